"""A rank that waits long reports whom it is waiting for, before it fails."""

import threading

import pytest

from tests.deadlines import FAR
from tfdist.cluster.session.pending_exchanges import PendingExchanges
from tfdist.cluster.spec.topology import Worker
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


@pytest.mark.parametrize("wait", ["exchange", "notice"])
def test_a_warning_before_the_deadline(sessions, monkeypatch, wait):
    lines = []
    for module in ("coordinator", "shared_state"):
        monkeypatch.setattr(f"tfdist.cluster.session.{module}.say", lines.append)
    chief, other = sessions(2, stall_warning=0.1)
    with pytest.raises(RendezvousError, match="timed out"):
        if wait == "exchange":
            chief.exchange("variable", b"", timeout=3.0)
        else:
            other.wait_notified("saved", 1, timeout=3.0)
    missing = other if wait == "exchange" else chief
    assert str(chief.topology.workers[missing.rank]) in lines[0]
    assert "it fails after 3 s" in lines[0]


class Notes:
    """An observer that keeps what it is told."""

    def __init__(self):
        self.stalled = threading.Event()
        self.told = []

    def on_exchange_begin(self, exchange):
        self.told.append((exchange.sequence, exchange.tag))

    def on_exchange_end(self, exchange, failed):
        self.told.append("failed" if failed else "done")

    def on_stall(self, message):
        self.told.append(message)
        self.stalled.set()


@pytest.mark.parametrize("late", [0, 2])
def test_all_ranks_are_told_of_a_stalled_exchange(sessions, in_parallel, late):
    group = sessions(3, stall_warning=1)
    notes = [Notes() for _ in group]
    for session, note in zip(group, notes, strict=True):
        session.observe(note)

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
    chief.observe(note := Notes())
    with pytest.raises(RendezvousError, match="timed out"):
        chief.exchange("variable", b"", timeout=0.2)
    assert note.told == [(1, "variable"), "failed"]
