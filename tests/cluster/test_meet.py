"""All workers find one another, or all learn why not."""

import dataclasses
import os
import socket
import subprocess
import sys
import time

import pytest

from tests.harness.deadlines import FAR
from tfdist._src.cluster import Topology, meet
from tfdist._src.cluster.auth import identity
from tfdist._src.cluster.auth.handshake import handshake
from tfdist._src.cluster.auth.identity import Identity
from tfdist._src.cluster.cluster_spec import Worker
from tfdist._src.cluster.net import wait_messages
from tfdist._src.cluster.net.framing import WireError
from tfdist._src.cluster.net.listener import local_addresses
from tfdist._src.cluster.net.sockets import connect
from tfdist._src.cluster.rendezvous import rendezvous
from tfdist._src.cluster.rendezvous.rendezvous import RendezvousClient, RendezvousServer
from tfdist._src.options import Options
from tfdist.errors import ClusterError, RendezvousError

LISTEN = """
import socket, sys
sock = socket.socket(socket.AF_INET6)
sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
sock.bind(("::", int(sys.argv[1])))
sock.listen()
"""


def port(address):
    return int(address.rpartition(":")[2])


@pytest.mark.parametrize("topology", [Topology(), Topology((Worker("worker", 0, "h:1"),))])
def test_a_single_worker_meets_nobody(topology):
    session = meet(topology, Options())
    assert (session.rank, session.size) == (0, 1)
    session.close()


@pytest.mark.parametrize("count", [2, 3, 4])
def test_workers_meet_in_order_of_rank(sessions, count):
    group = sessions(count)
    assert [session.rank for session in group] == list(range(count))
    assert {session.size for session in group} == {count}


@pytest.mark.parametrize("host", ["localhost", "[::1]", socket.gethostname()])
def test_meet_by_name_and_by_ipv6(addresses, attempt, host):
    cluster = [f"{host}:{port(address)}" for address in addresses(2)]
    if host == "[::1]" and "::1" not in local_addresses():
        pytest.skip("no IPv6 here")
    for one in [attempt(cluster, rank) for rank in range(2)]:
        one.met()


def test_rank_0_arrives_last(addresses, attempt, monkeypatch, until):
    monkeypatch.setattr(wait_messages, "FIRST_SECONDS", 0.0)
    cluster = addresses(3)
    others = [attempt(cluster, 1), attempt(cluster, 2)]
    until(lambda: all(one.lines for one in others))
    for one in [attempt(cluster, 0), *others]:
        one.met()


def test_every_port_is_free_for_another_listener(addresses, attempt):
    cluster = addresses(3)
    group = [one.met() for one in [attempt(cluster, rank) for rank in range(3)]]
    for address in cluster:
        subprocess.run([sys.executable, "-c", LISTEN, str(port(address))], check=True)
    assert group[0].size == 3


def test_sockets_are_kept_alive_and_not_inherited(sessions):
    for session in sessions(2):
        (connection,) = session._role._connections._by_rank.values()
        assert not os.get_inheritable(connection.sock.fileno())
        assert connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)


def test_self_connections_are_rejected(addresses, monkeypatch):
    class Unlucky(socket.socket):
        """The kernel assigns it the port that it dials, at which nothing listens."""

        def connect(self, address):
            self.bind(address)
            super().connect(address)

    (address,) = addresses(1)
    endpoints = [(socket.AF_INET, ("127.0.0.1", port(address)))]
    monkeypatch.setattr(socket, "socket", Unlucky)
    with pytest.raises(ConnectionRefusedError, match="nothing listens"):
        connect(endpoints, time.monotonic() + FAR)


def test_this_address_is_checked_first(addresses, attempt):
    cluster = [*addresses(1), "198.51.100.7:2222"]
    error = attempt(cluster, 1).failed()
    assert isinstance(error, ClusterError)
    assert "worker 1 (198.51.100.7:2222): this process's address is not on" in str(error)


@pytest.mark.parametrize("rank", [0, 1])
def test_this_port_in_use(addresses, attempt, rank):
    cluster = addresses(2)
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", port(cluster[rank])))
        holder.listen()
        error = attempt(cluster, rank).failed()
    assert f"in use by process {os.getpid()} (" in str(error)


@pytest.fixture
def unknown(monkeypatch):
    """The host names that do not resolve."""
    real, names = socket.getaddrinfo, {"h0x", "h1x", "h2x"}

    def getaddrinfo(host, *args, **kwargs):
        if host in names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real("127.0.0.1" if host in ("h1x", "h2x") else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return names


def test_rank_0_does_not_resolve(addresses, attempt, monkeypatch, unknown):
    monkeypatch.setattr("tfdist._src.cluster.net.dns._RETRY_FOR_SECONDS", 0.1)
    error = attempt(["h0x:2222", *addresses(1)], 1).failed()
    assert isinstance(error, ClusterError)
    assert "worker 0 (h0x:2222): the host name does not resolve" in str(error)


def test_rank_0_says_which_names_do_not_resolve(addresses, attempt, monkeypatch, until, unknown):
    monkeypatch.setattr(rendezvous, "STATUS_SECONDS", 0.05)
    monkeypatch.setattr(rendezvous, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(wait_messages, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(wait_messages, "EVERY_SECONDS", 0.05)
    one, two, three, four = addresses(4)
    cluster = [one, f"h1x:{port(two)}", f"h2x:{port(three)}", four]
    chief = attempt(cluster, 0)
    problem = "h1x does not resolve here (Name or service not known), nor does 1 more ["
    until(lambda: any(f"({four}); the name {problem}" in line for line in chief.lines))
    unknown.remove("h2x")
    problem = "h1x does not resolve here (Name or service not known) ["
    until(lambda: any(f"({four}); the name {problem}" in line for line in chief.lines))
    unknown.remove("h1x")
    until(lambda: chief.lines[-1].partition(" [")[0].endswith(f"worker 3 ({four})"))
    for one in [chief, *(attempt(cluster, rank) for rank in (1, 2, 3))]:
        one.met()


@pytest.mark.parametrize(
    "cluster",
    [None, 1, {}, [1], [[]], [["worker", 1.0, "a:1"]], [["worker", float("inf"), "a:1"]]],
)
def test_rank_0_sends_no_cluster(cluster):
    topology = Topology((Worker("worker", 0, "a:1"), Worker("worker", 1, "b:1")), 1, "worker", 1)
    client = RendezvousClient(topology, Options(), None, print)
    with pytest.raises(WireError, match="an invalid cluster"):
        client._differ(None, {"kind": "cluster", "cluster": cluster})


@pytest.fixture
def linger(monkeypatch):
    """Sets how long rank 0 waits for late workers, to send them an error."""
    return lambda seconds: monkeypatch.setattr(rendezvous, "_LINGER_SECONDS", seconds)


def test_different_clusters_are_refused_on_all_workers(addresses, attempt, linger):
    linger(FAR)
    cluster = addresses(4)
    wrong = [*cluster[:2], cluster[3]]
    group = [attempt(cluster[:3], 0), attempt(wrong, 1), attempt(cluster[:3], 2)]
    errors = [one.failed() for one in group]
    assert {type(error) for error in errors} == {ClusterError}
    (message,) = {str(error) for error in errors}
    here, there = f'"worker"[2] is "{cluster[2]}" at', f'"{cluster[3]}" at'
    for part in (here, there, f"process {os.getpid()}", 'the same "cluster"'):
        assert part in message


def test_two_processes_with_one_rank(addresses, attempt, linger):
    linger(0.0)  # rank 2 never arrives
    cluster = addresses(3)
    group = [attempt(cluster, rank) for rank in (0, 1, 1)]
    errors = [one.failed() for one in group]
    assert {type(error) for error in errors} == {ClusterError}
    (message,) = {str(error) for error in errors}
    assert f"Two processes claim to be worker 1 ({cluster[1]})" in message
    assert message.count(f"process {os.getpid()} on {socket.gethostname()}") == 2


def test_different_versions_are_refused_on_both_sides(addresses, attempt, monkeypatch, dial, until):
    cluster = addresses(2)
    coordinator = attempt(cluster, 0)
    dial(cluster[0]).close()
    until(lambda: coordinator.lines)  # it has read the version by now
    monkeypatch.setattr(identity, "__version__", "99.0")
    errors = [one.failed() for one in (coordinator, attempt(cluster, 1))]
    for error in errors:
        assert isinstance(error, ClusterError)
        assert "different versions of tfdist" in str(error)
        assert "99.0 at worker 1" in str(error)


def test_late_workers_receive_the_error(addresses, attempt, linger):
    linger(FAR)
    cluster = addresses(4)
    coordinator = attempt(cluster[:3], 0)
    attempt([*cluster[:2], cluster[3]], 1).failed()
    assert "different clusters" in str(attempt(cluster[:3], 2).failed())
    assert "different clusters" in str(coordinator.failed())


def test_waiting_is_reported(addresses, attempt, monkeypatch, until):
    monkeypatch.setattr(wait_messages, "FIRST_SECONDS", 0.2)
    monkeypatch.setattr(wait_messages, "EVERY_SECONDS", 0.2)
    cluster = addresses(4)
    early = attempt(cluster, 1)
    until(lambda: early.lines)
    start = f"worker 1 ({cluster[1]}) waiting for worker 0 ({cluster[0]}), which cannot"
    assert early.lines[0].startswith(start)
    assert early.lines[0].endswith(f"s of {FAR:.0f} s]")
    coordinator = attempt(cluster, 0)
    missing = f"waiting for 2 of 4 workers: worker 2 ({cluster[2]}), worker 3 ({cluster[3]}) ["
    for one in (coordinator, early):
        until(lambda one=one: any(missing in line for line in one.lines))
    group = [coordinator, early, attempt(cluster, 2), attempt(cluster, 3)]
    for one in group:
        one.met()


def test_deadline_names_the_missing(addresses, attempt):
    cluster = addresses(3)
    group = [attempt(cluster, rank, start_timeout=1.0) for rank in (0, 1)]
    for one in group:
        error = one.failed()
        assert isinstance(error, RendezvousError)
        for part in (f"worker 2 ({cluster[2]})", "1 s", "TFDIST_START_TIMEOUT"):
            assert part in str(error)
        assert f"worker 1 ({cluster[1]}), worker 2" not in str(error)


def test_deadline_without_rank_0(addresses, attempt, dial):
    cluster = addresses(2)
    error = attempt(cluster, 1, start_timeout=0.5).failed()
    assert isinstance(error, RendezvousError)
    assert f"worker 0 ({cluster[0]}), which cannot be reached: nothing listens there " in str(error)


def greet(dial, address, topology, **changes):
    """Dials rank 0 as a worker does, and returns the connection."""
    sock = dial(address)
    hello = dataclasses.replace(Identity.of(topology), **changes)
    handshake(sock, hello, "", time.monotonic() + FAR, first=True)
    return sock


def test_a_worker_restarted_while_waiting(addresses, attempt, dial, until):
    cluster = addresses(3)
    coordinator = attempt(cluster, 0)
    topology = Topology(coordinator.topology.workers, 1, "worker", 1)
    greet(dial, cluster[0], topology).close()
    until(lambda: any("disconnected" in line for line in coordinator.lines))
    for one in (coordinator, attempt(cluster, 1), attempt(cluster, 2)):
        one.met()


def test_a_worker_that_died_before_the_last_arrived(addresses, attempt, monkeypatch, dial, until):
    held = []

    def admit(rendezvous, *arrival):
        held.append(arrival)
        if len(held) == 2:  # the first two at once: rank 0 sees the end of the first too late
            for one in held:
                real(rendezvous, *one)
        elif len(held) > 2:
            real(rendezvous, *arrival)

    real = RendezvousServer._admit
    monkeypatch.setattr(RendezvousServer, "_admit", lambda *args: admit(*args))
    cluster = addresses(3)
    coordinator = attempt(cluster, 0)
    topology = Topology(coordinator.topology.workers, 1, "worker", 1)
    greet(dial, cluster[0], topology).close()
    last = attempt(cluster, 2)
    until(lambda: any("disconnected" in line for line in coordinator.lines))
    monkeypatch.setattr(RendezvousServer, "_admit", real)
    for one in (coordinator, last, attempt(cluster, 1)):
        one.met()


def test_a_worker_that_reconnects_replaces_itself(addresses, attempt, dial):
    cluster = addresses(3)
    coordinator = attempt(cluster, 0)
    topology = Topology(coordinator.topology.workers, 1, "worker", 1)
    with (
        greet(dial, cluster[0], topology, nonce="n"),
        greet(dial, cluster[0], topology, nonce="n") as again,
    ):
        last = attempt(cluster, 2)
        coordinator.met()
        last.met()
        again.settimeout(FAR)
        assert again.recv(4096)


def test_rank_0_restarted_while_waiting(addresses, attempt):
    cluster = addresses(3)
    worker = attempt(cluster, 1)
    topology = Topology(worker.topology.workers, 0, "worker", 0)
    with socket.socket() as first:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first.bind(("127.0.0.1", port(cluster[0])))
        first.listen()
        with first.accept()[0] as accepted:
            handshake(accepted, Identity.of(topology), "", time.monotonic() + FAR, first=False)
    for one in (attempt(cluster, 0), attempt(cluster, 2), worker):
        one.met()
