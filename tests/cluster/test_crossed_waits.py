"""A rank in an exchange and one that waits for it elsewhere are told of one another."""

import itertools

import pytest

from tests.harness.deadlines import FAR
from tests.harness.tiers import exhaustive, some
from tfdist.errors import ProgramMismatchError, RendezvousError

GATHER = {"communicator": "workers", "what": "all_gather 'x'", "number": 3, "waits_for": [0, 2]}
EXCHANGE = {"communicator": "session", "what": "exchange 'a'", "number": 1, "waits_for": None}


def report(*operations, **more):
    return lambda: {"operations": list(operations), "queued": 0, "main": "step (a.py:3)", **more}


@pytest.mark.parametrize(
    ("missing", "where"),
    some(itertools.product([0, 1, 2], ["workers", "notices"]), always=[(1, "workers")]),
)
def test_both_are_named(sessions, in_parallel, missing, where):
    group = sessions(3, stall_warning=0.1)
    others = [rank for rank in range(3) if rank != missing]
    waits = {**GATHER, "communicator": where, "waits_for": others}
    for session in group:
        session.report.made_by(report(waits if session.rank == missing else EXCHANGE))
    lost = []
    group[missing].on_peer_lost(lost.append)

    def run(session):
        if session.rank != missing:
            with pytest.raises(ProgramMismatchError, match="wait for one another") as error:
                session.exchange("a", b"", timeout=FAR)
            return str(error.value)
        return ""

    told = set(in_parallel(run, group)) - {""}
    assert len(told) == 1
    (message,) = told
    for rank in (missing, others[0]):
        assert f"{group[0].topology.workers[rank]}, in step (a.py:3)," in message
    what = "in all_gather 'x', which" if where == "workers" else "in a wait for notice"
    assert what in message and "\n" not in message
    assert lost in ([], [message])  # As the connections' threads come to it.


@exhaustive
@pytest.mark.parametrize(
    "reports",
    [
        # The rank that is waited for will come to it.
        (report(EXCHANGE, GATHER), report(GATHER)),
        (report(EXCHANGE, queued=1), report(GATHER)),
        (report(), report(GATHER)),
        # The other one is busy, waits for another one, or cannot say.
        (report(EXCHANGE), report()),
        (report(EXCHANGE), report({**GATHER, "waits_for": [2]})),
        (report(EXCHANGE), report({**GATHER, "waits_for": None})),
        (report(EXCHANGE), lambda: {"operations": "?"}),
        (report(EXCHANGE), dict),
    ],
)
def test_a_rank_that_is_only_slow(sessions, reports):
    group = sessions(2, stall_warning=0.05)
    for session, own in zip(group, reports, strict=True):
        session.report.made_by(own)
    with pytest.raises(RendezvousError, match="timed out after 1 s"):
        group[0].exchange("a", b"", timeout=1.0)


def test_a_wait_that_has_gone_on_meanwhile(sessions):
    group = sessions(2, stall_warning=0.05)
    group[0].report.made_by(report(EXCHANGE))
    numbers = iter(range(10_000))
    group[1].report.made_by(lambda: report({**GATHER, "number": next(numbers)})())
    with pytest.raises(RendezvousError, match="timed out after 1 s"):
        group[0].exchange("a", b"", timeout=1.0)
