"""A rank that waits long reports whom it is waiting for, before it fails."""

import pytest

from tfdist.cluster.session.pending_exchanges import PendingExchanges
from tfdist.cluster.spec.topology import Worker
from tfdist.errors import RendezvousError


def test_warnings_are_repeated_when_the_wait_has_doubled():
    exchanges = PendingExchanges([Worker("worker", i, f"h{i}:1") for i in range(3)])
    exchanges.join(1, 0, "variable", b"", deadline=700.0, timeout=600.0)
    assert exchanges.slow(129.0, 30.0) == []
    line = "tfdist: exchange 'variable' has waited {} s for 2 of 3 workers: worker 0 (h0:1), "
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
