"""Observers, who ask rank 0 of a running job how it goes; with threads as ranks."""

import contextlib
import socket
import threading
import time

import pytest

from tests.certificates import files
from tests.harness.deadlines import FAR
from tests.harness.tiers import exhaustive
from tfdist._src.cluster import observe
from tfdist._src.cluster.auth.handshake import MAGIC, handshake
from tfdist._src.cluster.auth.identity import JOIN, Identity
from tfdist._src.cluster.net.framing import WireError, encode
from tfdist._src.cluster.observation import RankState, ask, decode_answer, encode_answer
from tfdist._src.cluster.session.connections import REPORT_LIMIT, Presence
from tfdist._src.options import Options
from tfdist.errors import ClusterError, RendezvousError, TlsError


@pytest.fixture
def observed(addresses, attempt):
    """Starts ranks whose rank 0 answers observers; returns them, its address, and its lines."""

    def start(count, **options):
        cluster = addresses(count)
        group = [a.met() for a in [attempt(cluster, rank, **options) for rank in range(count)]]
        lines = []
        for session in group:
            session.report.made_by(lambda session=session: {"rank": session.rank})
            observe(session, Options(**options), lines.append)
        return group, cluster[0], lines

    return start


def reports(seen):
    return [one.report for one in seen]


@pytest.mark.parametrize("tls", [False, pytest.param(True, marks=exhaustive)])
def test_an_observer_gets_the_reports_of_all_ranks(observed, tls, until):
    options = {"secret": "s", **(files() if tls else {})}
    group, address, _ = observed(3, **options)
    assert reports(ask(address, Options(**options))) == [{"rank": rank} for rank in range(3)]
    # Whatever a report does, the ranks go on.
    group[1].report.made_by(lambda: {"text": "x" * REPORT_LIMIT})
    group[2].report.made_by(lambda: 1 / 0)
    found = ask(address, Options(**options))
    assert "too long" in found[1].report["error"]
    assert "ZeroDivisionError" in found[2].report["error"]
    # While the workers connect to one another, the address is theirs.
    with group[0].address.free():
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", int(address.rpartition(":")[2])))
            other.listen()
        with pytest.raises(RendezvousError, match="nothing listens there"):
            ask(address, Options(**options))
    group[2].close()
    until(lambda: group[0].presence(2).gone)
    found = ask(address, Options(**options))
    assert found[2] == RankState(
        2, str(group[0].topology.workers[2]), None, "has left the job", None
    )
    assert found[0].report == {"rank": 0}
    group[0].close()
    with pytest.raises(RendezvousError, match="nothing listens there"):
        ask(address, Options(**options))


def test_strangers_get_nothing_and_disturb_nobody(observed, addresses, attempt, dial, in_parallel):
    group, address, lines = observed(2, secret="s")
    right = Options(secret="s")
    with pytest.raises(ClusterError, match="their secrets differ"):
        ask(address, Options(secret="other"))
    with pytest.raises(TlsError, match="it does not use TLS"):
        ask(address, Options(secret="s", **files()))
    garbage = [b"GET / HTTP/1.1\r\n\r\n", MAGIC + b"\xff" * 8, MAGIC + encode({"kind": "hello"})]
    for one in garbage:
        with dial(address) as sock, contextlib.suppress(ConnectionResetError):
            sock.sendall(one)
            while sock.recv(4096):
                pass
    # Each purpose has its own proof: a worker cannot pass as an observer, nor the reverse.
    worker = Identity.of(group[1].topology, JOIN)
    with dial(address) as sock, pytest.raises(OSError):
        handshake(sock, worker, "s", time.monotonic() + FAR, first=True)
    waiting = addresses(2)
    chief = attempt(waiting, 0, secret="s")
    dial(waiting[0]).close()
    with pytest.raises(RendezvousError, match="did not answer as rank 0 of a running job"):
        ask(waiting[0], right)
    attempt(waiting, 1, secret="s").met()
    assert any("connected for 'observe'" in line for line in chief.lines)
    # More than are accepted at once, and all silent.
    silent = [dial(address) for _ in range(40)]
    assert reports(ask(address, right)) == [{"rank": 0}, {"rank": 1}]
    assert "does not have the secret" in lines[0]
    for one in silent:
        one.close()
    assert in_parallel(lambda s: s.exchange("on", b""), group) == [[b"", b""]] * 2


@exhaustive
def test_a_rank_that_does_not_answer_is_named(observed, monkeypatch):
    monkeypatch.setattr("tfdist._src.cluster.observation.PATIENCE_SECONDS", 0.3)
    group, address, _ = observed(3)
    busy = threading.Event()
    group[1].report.made_by(lambda: busy.wait(FAR))
    found = ask(address, Options())
    assert reports(found) == [{"rank": 0}, None, {"rank": 2}]
    assert found[1].silence >= 0
    assert not found[1].gone
    busy.set()


@exhaustive
def test_several_observers_share_an_answer_and_too_many_are_told(observed, in_parallel):
    group, address, _ = observed(2)
    released = threading.Event()
    asked = []
    group[1].report.made_by(lambda: asked.append(1) or {"released": released.wait(FAR)})
    timer = threading.Timer(1.5, released.set)
    timer.start()
    found = in_parallel(lambda _: ask(address, Options()), list(range(12)))
    told = [one for one in found if isinstance(one, RendezvousError)]
    assert all("is answering other queries" in str(one) for one in told)
    assert 0 < len(told) < 12
    assert len(asked) == 1
    timer.join()


@exhaustive
def test_a_job_that_is_open_to_strangers_answers_nobody(observed, monkeypatch):
    monkeypatch.setattr("tfdist._src.cluster.observation.is_closed", lambda *_: False)
    _, address, _ = observed(2)
    with pytest.raises(RendezvousError, match="has a secret"):
        ask(address, Options())


@exhaustive
def test_an_address_that_is_taken_does_not_fail_the_job(observed, in_parallel):
    group, address, lines = observed(2)
    with socket.socket() as other, group[0].address.free():
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", int(address.rpartition(":")[2])))
        other.listen()
    assert "cannot query this job" in lines[0]
    with group[0].address.free():
        pass
    assert len(lines) == 1
    assert reports(ask(address, Options())) == [{"rank": 0}, {"rank": 1}]
    assert in_parallel(lambda s: s.exchange("on", b""), group) == [[b"", b""]] * 2


@exhaustive
def test_versions_must_be_the_same(observed, monkeypatch):
    _, address, _ = observed(2)
    ask(address, Options())  # Rank 0 listens, and keeps its version.
    monkeypatch.setattr("tfdist._src.cluster.auth.identity.__version__", "99")
    with pytest.raises(ClusterError, match=r"runs tfdist .*, but this is tfdist 99: run"):
        ask(address, Options())
    with pytest.raises(ClusterError, match="has no port"):
        ask("10.0.0.1", Options())


@exhaustive
def test_answers_that_are_malformed():
    good = encode_answer(["a", "b"], [Presence(0.0), Presence(None, "lost")], {0: b"{", 1: b"[]"})
    assert b"lost" in good
    header = {"kind": "answer", "ranks": [["a\n", 1.0, "", 1], ["b", None, "gone", 2]]}
    one, two = decode_answer(header, b"{[]")
    assert (one.worker, one.report) == ("a?", {"error": "its report is malformed"})
    assert (two.gone, two.report) == ("gone", {"error": "its report is malformed"})
    for wrong in (
        None,
        [],
        [3],
        [["a", 1.0, ""]],
        [["a", 1.0, "", 1, 1]],
        [["a", 1.0, "", -1]],
        [["a", 1.0, "", 9]],
        [["a", True, "", 1]],
        [["a", 1.0, None, 1]],
    ):
        with pytest.raises(WireError):
            decode_answer({"kind": "answer", "ranks": wrong}, b"{}")
