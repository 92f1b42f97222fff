"""Exchanges complete, mismatch, or are stuck; all without communication."""

import pytest

from tfdist.cluster.session.pending_exchanges import PendingExchanges
from tfdist.cluster.spec.topology import Worker
from tfdist.errors import PeerLostError, ProgramMismatchError, RendezvousError

WORKERS = [Worker("worker", n, f"h{n}:1") for n in range(3)]


@pytest.fixture
def ledger():
    return PendingExchanges(WORKERS)


def join(ledger, rank, sequence=0, tag="a", deadline=10.0):
    payload = f"{rank}{sequence}".encode()
    return ledger.join(rank, sequence, tag, payload, deadline=deadline, timeout=deadline)


def test_completes_in_rank_order(ledger):
    assert join(ledger, 2) is None
    assert join(ledger, 0) is None
    assert join(ledger, 1) == [b"00", b"10", b"20"]
    assert ledger.stuck(1e9) is None


def test_one_rank_ahead(ledger):
    join(ledger, 0)
    join(ledger, 1)
    join(ledger, 1, sequence=1, tag="b")
    assert join(ledger, 2) == [b"00", b"10", b"20"]
    join(ledger, 2, sequence=1, tag="b")
    assert join(ledger, 0, sequence=1, tag="b") == [b"01", b"11", b"21"]


def test_mismatch_names_both(ledger):
    join(ledger, 2, tag="fit")
    with pytest.raises(ProgramMismatchError) as caught:
        join(ledger, 1, tag="evaluate")
    for part in ("exchange 0", "'fit' at worker 2 (h2:1)", "'evaluate' at worker 1 (h1:1)"):
        assert part in str(caught.value)


def test_the_first_deadline_counts(ledger):
    join(ledger, 0, deadline=9.0)
    join(ledger, 1, deadline=5.0)
    assert ledger.stuck(4.9) is None
    error = ledger.stuck(5.0)
    assert isinstance(error, RendezvousError)
    assert "'a' waited 5 s in vain for 1 of 3 workers: worker 2 (h2:1)" in str(error)


def test_left_before_joining(ledger):
    ledger.leave(2)
    assert ledger.stuck(0) is None
    join(ledger, 0)
    error = ledger.stuck(0)
    assert isinstance(error, PeerLostError)
    assert "rank 2, worker 2 (h2:1), has ended and never joins exchange 'a'" in str(error)


def test_left_after_joining(ledger):
    join(ledger, 2)
    ledger.leave(2)
    join(ledger, 0)
    assert ledger.stuck(0) is None
    assert join(ledger, 1) == [b"00", b"10", b"20"]
