"""Exchanges complete, mismatch, or get stuck; without communication."""

import pytest

from tfdist._src.cluster.cluster_spec import Worker
from tfdist._src.cluster.session.coordinator import PendingExchanges
from tfdist.errors import PeerLostError, ProgramMismatchError, RendezvousError

WORKERS = [Worker("worker", n, f"h{n}:1") for n in range(3)]


@pytest.fixture
def exchanges():
    return PendingExchanges(WORKERS)


def join(exchanges, rank, sequence=0, tag="a", deadline=10.0):
    payload = f"{rank}{sequence}".encode()
    done = exchanges.join(rank, sequence, tag, payload, deadline=deadline, timeout=deadline)
    return None if done is None else done.in_rank_order()


def test_completes_in_rank_order(exchanges):
    assert join(exchanges, 2) is None
    assert join(exchanges, 0) is None
    assert join(exchanges, 1) == [b"00", b"10", b"20"]
    assert exchanges.stuck(1e9) is None


def test_one_rank_ahead(exchanges):
    join(exchanges, 0)
    join(exchanges, 1)
    join(exchanges, 1, sequence=1, tag="b")
    assert join(exchanges, 2) == [b"00", b"10", b"20"]
    join(exchanges, 2, sequence=1, tag="b")
    assert join(exchanges, 0, sequence=1, tag="b") == [b"01", b"11", b"21"]


def test_mismatch_names_both(exchanges):
    join(exchanges, 2, tag="fit")
    with pytest.raises(ProgramMismatchError) as caught:
        join(exchanges, 1, tag="evaluate")
    for part in ("exchange 0", "'fit' at worker 2 (h2:1)", "'evaluate' at worker 1 (h1:1)"):
        assert part in str(caught.value)


def test_the_first_deadline_counts(exchanges):
    join(exchanges, 0, deadline=9.0)
    join(exchanges, 1, deadline=5.0)
    assert exchanges.stuck(4.9) is None
    error = exchanges.stuck(5.0)
    assert isinstance(error, RendezvousError)
    assert "'a' timed out after 5 s waiting for 1 of 3 workers: worker 2 (h2:1)" in str(error)


def test_left_before_joining(exchanges):
    exchanges.leave(2)
    assert exchanges.stuck(0) is None
    join(exchanges, 0)
    error = exchanges.stuck(0)
    assert isinstance(error, PeerLostError)
    assert "rank 2, worker 2 (h2:1), has left the job without joining exchange 'a'" in str(error)


def test_left_after_joining(exchanges):
    join(exchanges, 2)
    exchanges.leave(2)
    join(exchanges, 0)
    assert exchanges.stuck(0) is None
    assert join(exchanges, 1) == [b"00", b"10", b"20"]
