"""A rank that waits long reports whom it is waiting for, before it fails."""

import threading

import pytest

from tests.harness.deadlines import FAR
from tests.harness.tiers import exhaustive, some
from tfdist._src.cluster.cluster_spec import Worker
from tfdist._src.cluster.session.agent import is_overdue
from tfdist._src.cluster.session.coordinator import PendingExchanges
from tfdist.errors import RendezvousError


def test_warnings_are_repeated_when_the_wait_has_doubled():
    exchanges = PendingExchanges([Worker("worker", i, f"h{i}:1") for i in range(3)])
    exchanges.join(1, 0, "variable", b"", deadline=700.0, timeout=600.0)
    assert exchanges.slow(129.0, 30.0) == []
    line = "exchange 'variable' has waited {} s for 2 of 3 workers: worker 0 (h0:1), "
    line += "worker 2 (h2:1); it fails after 600 s"
    assert exchanges.slow(130.0, 30.0) == [line.format(30)]
    assert exchanges.slow(159.0, 30.0) == []
    assert exchanges.slow(160.0, 30.0) == [line.format(60)]


@pytest.mark.parametrize("wait", some(["exchange", "notice"], always=["exchange"]))
def test_a_warning_before_the_deadline(sessions, caplog, wait):
    chief, other = sessions(2, stall_warning=0.1)
    with pytest.raises(RendezvousError, match="timed out"):
        if wait == "exchange":
            chief.exchange("variable", b"", timeout=3.0)
        else:
            other.wait_notified("saved", 1, timeout=3.0)
    missing = other if wait == "exchange" else chief
    assert str(chief.topology.workers[missing.rank]) in caplog.messages[0]
    assert "it fails after 3 s" in caplog.messages[0]


class Notes:
    """A recorder that keeps what it is told."""

    def __init__(self):
        self.stalled = threading.Event()
        self.told = []

    def on_exchange_begin(self, awaited):
        self.told.append((awaited.sequence, awaited.tag))

    def on_exchange_end(self, awaited, failed):
        self.told.append("failed" if failed else "done")

    def on_stall(self, message):
        self.told.append(message)
        self.stalled.set()


@pytest.mark.parametrize("late", [0, 2])
def test_all_ranks_are_told_of_a_stalled_exchange(sessions, in_parallel, late):
    group = sessions(3, stall_warning=1)
    notes = [Notes() for _ in group]
    for session, note in zip(group, notes, strict=True):
        session.record_exchanges(note)

    def join(session):
        session.exchange("greeting", b"")
        if session.rank == late:
            assert notes[late].stalled.wait(FAR)
        session.exchange("variable", b"")

    assert in_parallel(join, group) == [None] * 3
    for note in notes:
        told = [one for one in note.told if not str(one).startswith("exchange")]
        assert told == [(1, "greeting"), "done", (2, "variable"), "done"]
    missing = group[0].topology.workers[late]
    expected = f"exchange 'variable' has waited 1 s for 1 of 3 workers: {missing}; "
    assert any(str(one).startswith(expected) for one in notes[late].told), notes[late].told


def test_the_end_of_a_failed_exchange_is_told(sessions):
    chief, _ = sessions(2)
    chief.record_exchanges(note := Notes())
    with pytest.raises(RendezvousError, match="timed out"):
        chief.exchange("variable", b"", timeout=0.2)
    assert note.told == [(1, "variable"), "failed"]


@exhaustive
def test_a_stall_where_rank_0_is_stopped_is_told_by_the_others(job):
    body = """
    import signal
    class Notes:
        def on_exchange_begin(self, awaited): pass
        def on_exchange_end(self, awaited, failed): pass
        def on_stall(self, message): tell("recorded", message)
    session.record_exchanges(Notes())
    session.exchange("first", b"")
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    session.exchange("second", b"")
    """
    _, *others = job(3, body, TFDIST_STALL_WARNING="1", TFDIST_COLLECTIVE_TIMEOUT=str(FAR))
    for process in others:
        for begin in ("tfdist: ", "recorded "):
            line = process.until("has not named the missing workers")
            assert line.startswith(f"{begin}exchange 'second' has waited "), line
            assert "rank 0, worker 0 (127.0.0.1:" in line


@exhaustive
def test_a_rank_warns_itself_only_where_rank_0_is_late():
    # Rank 0 warns after 30, 60, 120 and 240 seconds.
    for told in (0, 30, 60, 120):
        until = max(30, 2 * told)
        assert not is_overdue(until, until - told, 30)
        assert is_overdue(told + 1.5 * max(30, told), 1.5 * max(30, told), 30)


@exhaustive
def test_the_wait_for_a_notice_is_recorded_and_its_stall_told_to_all(sessions, in_parallel):
    group = sessions(3, stall_warning=1)
    notes = [Notes() for _ in group]
    for session, note in zip(group, notes, strict=True):
        session.record_exchanges(note)

    def wait(session):
        if session.rank == 1:
            assert [n.text for n in session.wait_notified("saved", 1)] == ["done"]
            return
        assert notes[session.rank].stalled.wait(FAR)
        if session.rank == 0:
            (awaited,) = group[1].awaited
            assert (awaited.what, awaited.sequence, awaited.is_notice) == (
                "notice 'saved'",
                1,
                True,
            )
            session.notify("saved", "done")

    assert in_parallel(wait, group) == [None] * 3
    assert group[1].awaited == []
    begin, stall, end = notes[1].told
    assert (begin, end) == ((1, "saved"), "done")
    assert stall.startswith("rank 1 is waiting for rank 0, worker 0 (")
    for note in (notes[0], notes[2]):
        assert note.told == [f"{group[1].topology.me}: {stall}"]


@exhaustive
def test_of_many_ranks_that_stall_at_once_one_is_told(sessions, until):
    group = sessions(3)
    notes = [Notes() for _ in group]
    for session, note in zip(group, notes, strict=True):
        session.record_exchanges(note)
    for session in group[1:]:
        session.stalled("all_reduce 'g' has waited 30 s")
    assert notes[0].stalled.wait(FAR)
    until(lambda: notes[1].told or notes[2].told)
    # The second one has come when an exchange after it is complete.
    threads = [threading.Thread(target=s.exchange, args=("end", b"")) for s in group]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stalls = [
        [one for one in note.told if isinstance(one, str) and "waited" in one] for note in notes
    ]
    assert len(stalls[0]) == 1
    assert sorted(map(len, stalls[1:])) == [0, 1]
