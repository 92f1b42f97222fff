"""Sessions, with threads as ranks."""

import os
import threading
import time

import pytest

from tests.harness.deadlines import FAR
from tests.harness.tiers import exhaustive
from tfdist._src.cluster import Loss, Session, Topology
from tfdist._src.cluster.net.framing import encode
from tfdist._src.cluster.session import session as session_module
from tfdist._src.options import Options
from tfdist.errors import PeerLostError, ProgramMismatchError, RendezvousError


def alone():
    return Session(Topology(), {}, Options())


def group_of(sessions, count):
    return [alone()] if count == 1 else sessions(count)


def messages(errors, kind):
    assert {type(error) for error in errors} == {kind}
    return {str(error) for error in errors}


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_an_exchange_gives_all_payloads_to_every_rank(sessions, in_parallel, count):
    group = group_of(sessions, count)
    for size in (0, 1, 1000, 3_000_000 // count):
        payloads = [bytes([rank]) * (size + rank) for rank in range(count)]
        tag = f"of {size}"
        got = in_parallel(lambda s, p=payloads, t=tag: s.exchange(t, p[s.rank]), group)
        assert got == [payloads] * count


def test_many_exchanges_at_different_paces(sessions, in_parallel):
    def work(session):
        for step in range(200):
            if step % 50 == session.rank:
                time.sleep(0.01)
            got = session.exchange(f"step {step}", f"{session.rank}.{step}".encode())
            assert got == [f"{rank}.{step}".encode() for rank in range(3)]
        return True

    assert in_parallel(work, sessions(3)) == [True] * 3


def test_threads_of_one_rank_take_turns(sessions, in_parallel):
    first, second = sessions(2)
    one = in_parallel(lambda n: first.exchange("same", b"0") if n else None, [0])
    assert one == [None]
    calls = [lambda s=s: s.exchange("same", str(s.rank).encode()) for s in (first, second) * 5]
    assert in_parallel(lambda call: call(), calls) == [[b"0", b"1"]] * 10


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_interrupted_while_it_joins_fails_all(sessions, in_parallel, rank):
    """Otherwise it would be an exchange behind the others, or ahead of them."""
    group = sessions(2)

    def interrupted(*_):
        raise KeyboardInterrupt

    group[rank]._role.join = interrupted

    def exchange(session):
        if session.rank != rank:
            return session.exchange("x", b"")
        with pytest.raises(KeyboardInterrupt):
            session.exchange("x", b"")
        return None

    results = in_parallel(exchange, group)
    assert results[rank] is None
    assert "exchange 'x' was interrupted by KeyboardInterrupt()" in str(results[1 - rank])


def test_exchange_rejects_large_payloads(sessions, monkeypatch):
    monkeypatch.setattr(session_module, "MAX_BYTES", 1000)
    group = sessions(2)
    with pytest.raises(ValueError, match=r"at most 500 bytes on each of 2 workers\. Received: 501"):
        group[0].exchange("large", b"x" * 501)


def test_different_tags_are_a_program_mismatch(sessions, in_parallel):
    group = sessions(3)
    tags = ["train", "train", "evaluate"]
    errors = in_parallel(lambda s: s.exchange(tags[s.rank], b""), group)
    (message,) = messages(errors, ProgramMismatchError)
    for part in ("exchange 1", "'train' at worker", "'evaluate' at worker 2", "same script"):
        assert part in message
    again = in_parallel(lambda s: s.exchange("train", b""), group)
    assert messages(again, ProgramMismatchError) == {message}


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_exchange_deadline_names_the_absent(sessions, in_parallel, absent):
    group = sessions(3)
    present = [session for session in group if session.rank != absent]
    errors = in_parallel(lambda s: s.exchange("sum", b"", timeout=1.0), present)
    (message,) = messages(errors, RendezvousError)
    worker = group[0].topology.workers[absent]
    assert f"exchange 'sum' timed out after 1 s waiting for 1 of 3 workers: {worker}." in message
    with pytest.raises(RendezvousError, match="'sum' timed out"):
        group[absent].exchange("sum", b"")


@pytest.mark.parametrize("leaver", [0, 2])
def test_a_goodbye_is_no_loss_but_fails_exchanges(sessions, in_parallel, leaver):
    group = sessions(3)
    assert in_parallel(lambda s: s.exchange("a", b""), group) == [[b"", b"", b""]] * 3
    lost = []
    stay = [session for session in group if session.rank != leaver]
    for session in stay:
        session.on_peer_lost(lost.append)
    group[leaver].close()
    errors = in_parallel(lambda s: s.exchange("b", b""), stay)
    (message,) = messages(errors, PeerLostError)
    assert f"rank {leaver}, worker {leaver} (" in message
    assert "has left the job" in message
    assert lost == []


def test_goodbye_while_others_wait(sessions, in_parallel):
    group = sessions(3)
    timer = threading.Timer(0.2, group[1].close)
    timer.start()
    errors = in_parallel(lambda s: s.exchange("b", b""), [group[0], group[2]])
    (message,) = messages(errors, PeerLostError)
    assert "rank 1, worker 1 (" in message
    timer.join()


def test_close_does_not_linger_and_works_once(sessions, monkeypatch):
    monkeypatch.setattr("tfdist._src.cluster.session.session._LINGER_SECONDS", FAR)
    for session in sessions(3):
        session.close()
        session.close()
        with pytest.raises(PeerLostError, match=r"closed its session|rank 0.* has left the job"):
            session.exchange("a", b"")


def test_close_from_the_callback(sessions):
    group = sessions(2)
    done = threading.Event()
    group[1].on_peer_lost(lambda message: (group[1].close(), done.set()))
    cut(group[0], 1)
    assert done.wait(FAR)


def cut(session, rank):
    """Breaks a connection, as if the process had died."""
    connection = session._role._connections._by_rank[rank]
    connection.sock.shutdown(2)


def test_every_rank_hears_of_a_loss_once(sessions, in_parallel):
    group = sessions(4)
    heard = [[] for _ in group]
    told = [threading.Event() for _ in group]
    for session in group:
        session.on_peer_lost(heard[session.rank].append)
        session.on_peer_lost(lambda message, rank=session.rank: told[rank].set())
    cut(group[2], 0)
    for rank in (0, 1, 3):
        assert told[rank].wait(FAR)
    (message,) = {line for rank in (0, 1, 3) for line in heard[rank]}
    worker = group[0].topology.workers[2]
    assert message == f"rank 2, {worker} is lost: connection closed; see its log"
    assert group[0].lost_ranks == group[1].lost_ranks == [2]
    assert not group[0].silent_ranks and not group[1].silent_ranks
    cut(group[3], 0)
    others = [group[0], group[1]]
    errors = in_parallel(lambda s: s.exchange("a", b""), others)
    assert messages(errors, PeerLostError) == {message}
    assert [len(heard[rank]) for rank in (0, 1)] == [1, 1]


def test_callbacks_that_are_late_or_raise(sessions, capsys):
    group = sessions(2)
    told = threading.Event()
    group[0].on_peer_lost(lambda message: 1 / 0)
    group[0].on_peer_lost(lambda message: told.set())
    cut(group[1], 0)
    assert told.wait(FAR)
    assert "ZeroDivisionError" in capsys.readouterr().err
    late = []
    group[0].on_peer_lost(late.append)
    assert len(late) == 1


def test_silence_is_a_loss(sessions, monkeypatch):
    group = sessions(3, heartbeat_timeout=3.0)
    told = [threading.Event() for _ in group]
    lines = []
    for session in group:
        session.on_peer_lost(lambda message, rank=session.rank: lines.append((rank, message)))
        session.on_peer_lost(lambda message, rank=session.rank: told[rank].set())
    monkeypatch.setattr(group[1]._role._connections, "send", lambda rank, frame: None)
    for rank in (0, 1, 2):
        assert told[rank].wait(FAR)
    (message,) = {line for _, line in lines}
    assert "rank 1, worker 1 (" in message
    assert "no sign of life for 3 s" in message
    assert group[0].silent_ranks == group[2].silent_ranks == group[0].lost_ranks == [1]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_detector_reports_a_loss(sessions, rank):
    group = sessions(3)
    worker = str(group[0].topology.workers[1])
    found, told = [], threading.Event()
    group[rank].detect_by(lambda: found[0] if found else None)
    group[rank].on_peer_lost(lambda message: told.set())
    found.append(Loss(worker, f"{worker} is lost: no sign of life for 60 s.", silent=True))
    assert not told.is_set()
    os.write(group[rank].news, b"!")
    assert told.wait(FAR)
    message = f"rank 1, {worker} is lost: no sign of life for 60 s; see its log"
    assert group[rank].failure == message
    assert group[rank].silent_ranks == group[rank].lost_ranks == [1]
    assert group[rank].loss == Loss(worker, message, silent=True)
    # Rank 0 speaks for all; the core of another rank has told all others by itself.
    if rank == 0:
        heard = threading.Event()
        group[2].on_peer_lost(lambda message: heard.set())
        assert heard.wait(FAR)
        assert group[2].loss == group[0].loss


def test_a_detector_that_was_removed_is_not_asked(sessions):
    group = sessions(2)
    asked, other = [], threading.Event()
    remove = group[0].detect_by(lambda: asked.append("again"))
    asked.clear()
    remove()
    group[0].detect_by(lambda: other.set())
    other.clear()
    os.write(group[0].news, b"!")
    assert other.wait(FAR) and not asked


def test_a_detector_that_has_found_a_loss_or_raises(sessions, capsys):
    group = sessions(2)
    told = threading.Event()
    group[0].on_peer_lost(lambda message: told.set())

    def detect():
        if threading.current_thread() is not threading.main_thread():
            raise ZeroDivisionError

    group[0].detect_by(detect)
    os.write(group[0].news, b"!")
    worker = str(group[0].topology.workers[1])
    group[1].detect_by(lambda: Loss(worker, "it is lost."))
    assert group[1].lost_ranks == [1]
    cut(group[1], 0)
    assert told.wait(FAR)
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_single_process_has_no_news():
    session = alone()
    assert session.news < 0
    assert session.loss is None
    session.close()


@exhaustive
def test_heartbeats_of_an_idle_session(sessions, in_parallel):
    group = sessions(3, heartbeat_timeout=4.0)
    time.sleep(7)
    assert in_parallel(lambda s: s.exchange("a", b""), group) == [[b"", b"", b""]] * 3


@exhaustive
def test_heartbeats_only_where_nothing_else_was_sent(sessions, monkeypatch):
    group = sessions(3, heartbeat_timeout=FAR)
    connections = group[0]._role._connections
    sent = []
    monkeypatch.setattr(connections, "send", lambda rank, frame: sent.append(rank))
    now = time.monotonic()
    for rank, seconds in ((1, connections._interval), (2, 1.0)):
        connections._by_rank[rank].last_sent = now - seconds
    connections._watch(None, now)  # its own thread calls it as well
    assert set(sent) == {1}


@pytest.mark.parametrize(
    "frame", [b"\xff" * 100, encode({"kind": "dance"}), encode({"kind": "join"})]
)
def test_malformed_frames_are_a_loss(sessions, frame):
    group = sessions(2)
    told = threading.Event()
    lines = []
    group[0].on_peer_lost(lambda message: (lines.append(message), told.set()))
    group[1]._role._connections.send(0, frame)
    assert told.wait(FAR)
    assert "rank 1, worker 1 (" in lines[0]
    assert "malformed frame" in lines[0]


def test_notices_arrive_or_time_out_naming_the_sender(sessions, in_parallel):
    group = sessions(3)
    for _ in range(3):
        group[0].notify("saved", "here")
    group[0].notify("other")
    notices = in_parallel(lambda s: s.wait_notified("saved", 3), group)
    assert [[one.text for one in own] for own in notices] == [["here"] * 3] * 3
    group[1].wait_notified("saved", 2, timeout=0)
    with pytest.raises(RendezvousError) as caught:
        group[1].wait_notified("saved", 4, timeout=0.1)
    for part in ("0.1 s", "notice 4 of 'saved'", "rank 0, worker 0 ("):
        assert part in str(caught.value)
    timer = threading.Timer(0.1, group[0].notify, ["saved"])
    timer.start()
    group[2].wait_notified("saved", 4)
    timer.join()
    with pytest.raises(ValueError, match=r"notify\(\) is for rank 0"):
        group[1].notify("saved")


def test_notices_fail_without_rank_0(sessions):
    group = sessions(2)
    group[0].notify("saved")
    group[0].close()
    group[1].wait_notified("saved", 1)
    with pytest.raises(PeerLostError, match=r"rank 0, worker 0 \(.*has left the job"):
        group[1].wait_notified("saved", 2)


def test_a_session_of_one_rank_waits_for_nobody():
    session = alone()
    assert (session.rank, session.size) == (0, 1)
    session.notify("saved")
    session.wait_notified("saved", 1, timeout=0)
    session.on_peer_lost(print)
    session.close()
    with pytest.raises(PeerLostError):
        session.exchange("a", b"")
