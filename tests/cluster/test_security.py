"""Jobs that are open to strangers, and what strangers can do."""

import socket
import time

import pytest

from tests.harness.deadlines import FAR
from tfdist._src.cluster import Topology, Worker
from tfdist._src.cluster.auth import handshake
from tfdist._src.cluster.auth.handshake import MAGIC, check_security, is_closed, summary
from tfdist._src.cluster.auth.identity import Identity
from tfdist._src.cluster.net.framing import encode, read_exactly, read_frame
from tfdist._src.options import Options
from tfdist.errors import ClusterError, RendezvousError

LOCAL = Topology((Worker("worker", 0, "127.0.0.1:1"), Worker("worker", 1, "[::1]:1")), 0)
APART = Topology((Worker("worker", 0, "a:1"), Worker("worker", 1, "b:1")), 0, "worker", 0)
TLS = {f"tls_{name}": "file" for name in ("certificate", "key", "ca")}


@pytest.mark.parametrize(
    ("topology", "settings", "closed"),
    [
        (Topology(), {}, True),
        (LOCAL, {}, True),
        (APART, {}, False),
        (APART, {"secret": "s"}, True),
        (APART, TLS, True),
    ],
)
def test_closed_jobs_get_no_warning(topology, settings, closed):
    lines = []
    assert is_closed(topology, Options(**settings)) == closed
    check_security(topology, Options(**settings), lines.append)
    assert len(lines) == (not closed)


@pytest.mark.parametrize(
    ("topology", "settings", "said"),
    [
        (LOCAL, {}, "none; only processes of this host"),
        (APART, {}, "none: anyone who can reach the workers' ports"),
        (APART, {"secret": "s"}, "a secret"),
        (APART, TLS, "TLS certificates"),
    ],
)
def test_what_the_doctor_says(topology, settings, said):
    assert summary(topology, Options(**settings)).startswith(said)


def test_open_jobs_get_one_warning():
    lines = []
    check_security(APART, Options(), lines.append)
    (line,) = lines
    for part in ("anyone who can reach the workers' ports", "TFDIST_SECRET", "Kubernetes", "Slurm"):
        assert part in line
    check_security(APART, Options(security="none"), lines.append)
    other = Topology(APART.workers, 1, "worker", 1)
    check_security(other, Options(), lines.append)  # one line for the job
    assert len(lines) == 1
    with pytest.raises(ClusterError, match="neither a secret nor TLS"):
        check_security(APART, Options(security="required"), lines.append)


@pytest.fixture
def open_job(monkeypatch):
    """Loopback counts as a network."""
    monkeypatch.setattr(handshake, "_is_loopback", lambda host: False)


def test_a_stranger_cannot_fail_an_open_job(open_job, addresses, attempt):
    cluster = addresses(4)
    coordinator = attempt(cluster[:3], 0)
    wrong = attempt([*cluster[:2], cluster[3]], 1).failed()
    assert isinstance(wrong, ClusterError)
    assert f'"worker"[2] is "{cluster[2]}" at' in str(wrong)
    for one in (attempt(cluster[:3], 1), attempt(cluster[:3], 2), coordinator):
        one.met()
    assert any("refused worker 1" in line for line in coordinator.lines)


def test_the_deadline_of_an_open_job_names_who_was_refused(open_job, addresses, attempt):
    cluster = addresses(3)
    coordinator = attempt(cluster[:2], 0, start_timeout=3.0)
    attempt([cluster[0], cluster[2]], 1).failed()
    error = coordinator.failed()
    assert isinstance(error, RendezvousError)
    assert "Refused meanwhile: The workers have different clusters" in str(error)


def test_a_flood_from_one_address_keeps_nobody_out(addresses, attempt, monkeypatch, dial):
    """Those that came last displace those that came first, of the same address only."""
    monkeypatch.setattr("tfdist._src.cluster.rendezvous.acceptor._MAX_STRANGERS", 20)
    monkeypatch.setattr("tfdist._src.cluster.rendezvous.acceptor.ACCEPT_SECONDS", FAR)
    monkeypatch.setattr("tfdist._src.cluster.rendezvous.acceptor._EVERY_SECONDS", FAR)
    cluster = addresses(2)
    coordinator = attempt(cluster, 0)
    flood = [dial(cluster[0]) for _ in range(100)]
    worker = attempt(cluster, 1)
    for one in (coordinator, worker):
        one.met()
    reported = [line for line in coordinator.lines if "dropped" in line]
    assert len(reported) == 2  # one, and the others summed up
    assert "too many connections from one address" in reported[1]
    for one in flood:
        one.close()


def test_the_listener_says_nothing_of_itself_to_strangers(addresses, attempt, dial):
    cluster = addresses(2)
    coordinator = attempt(cluster, 0, secret="s")
    topology = Topology(coordinator.topology.workers, 1, "worker", 1)
    hello = {"kind": "hello", **vars(Identity.of(topology)), "challenge": "0" * 64}
    with dial(cluster[0]) as stranger:
        stranger.sendall(MAGIC + encode(hello))
        assert read_exactly(stranger, len(MAGIC), time.monotonic() + FAR) == MAGIC
        header, payload = read_frame(stranger, 4096, time.monotonic() + FAR)
        assert set(header) == {"kind", "protocol", "challenge"} and payload == b""
        stranger.shutdown(socket.SHUT_WR)
    for one in (attempt(cluster, 1, secret="s"), coordinator):
        one.met()
