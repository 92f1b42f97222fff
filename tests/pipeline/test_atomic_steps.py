"""A pipeline's step in which a worker fails counts on each of the workers, or leaves no trace."""

from __future__ import annotations

import pytest

from tests.harness.ranks import Ranks
from tests.harness.tiers import some

ATOMIC = "tests.pipeline.atomic_behaviours"
STEP = 3  # The one that fails: with accumulation, the second that updates weights.
BEFORE, FORWARD, BACKWARD, BEFORE_LAST, LAST, UPDATE = (
    "before",
    "forward",
    "backward",
    "before last",
    "last",
    "update",
)
INSIDE = (FORWARD, BACKWARD, BEFORE_LAST, LAST, UPDATE)
CASES = {
    "1f1b": (BEFORE, *INSIDE),
    "zb_h1": INSIDE,
    "interleaved": INSIDE,
    "tied clipped": INSIDE,
    "tied mixed": INSIDE,
    "accumulation": (BACKWARD, LAST, UPDATE),
    "accumulation clipped": (LAST,),
    "averages": (LAST,),
    "shared": (BACKWARD, LAST, UPDATE),
    "untrained clipped": (LAST, UPDATE),
    "reading": (BEFORE_LAST, LAST),
    "hybrid": INSIDE,
    "hybrid tied clipped scaled": INSIDE,
    "hybrid accumulation": (BACKWARD, LAST, UPDATE),
    "hybrid int8": (BACKWARD, LAST, UPDATE),
    "hybrid topk interleaved": (BACKWARD, LAST),
    "hybrid powersgd tied": (BACKWARD, LAST),
    "hybrid sharded": (BACKWARD, BEFORE_LAST, LAST, UPDATE),
    "hybrid sharded tied": (BEFORE_LAST, LAST, UPDATE),
    "hybrid sharded clipped": (LAST,),
}
KEEPS_ALL = {"reading", "hybrid sharded tied"}  # whose update is followed by communication


def workers_of(case):
    return 4 if case.startswith("hybrid") else 2


# A worker dies, or its step raises, before it updates; each rank in turn.
EVERY = [(case, where) for case, places in CASES.items() for where in places]
ALL = [
    (case, where, number % workers_of(case), where == UPDATE or number % 5 != 2)
    for number, (case, where) in enumerate(EVERY)
]
ALL += [("1f1b", where, rank, False) for where in INSIDE[:-1] for rank in (0, 1)]
ALL += [("hybrid", where, rank, True) for where in (BACKWARD, LAST) for rank in range(4)]
ALL = list(dict.fromkeys(ALL))

_undisturbed = {}


def undisturbed(case):
    """The states of a training in which nobody fails, by rank, and what a step communicates."""
    if case not in _undisturbed:
        group = Ranks(workers_of(case))
        answers = group.run(f"{ATOMIC}:undisturbed", case)
        group.stop()
        assert all(standing == len(states) - 1 for states, _, _, standing in answers)
        # A worker without anything to train keeps the little that it writes.
        expected = [case in KEEPS_ALL] if "untrained" not in case else [False, True]
        assert [keeps for _, _, keeps, _ in answers] == expected * (
            workers_of(case) // len(expected)
        )
        _undisturbed[case] = [states for states, *_ in answers], [names for _, names, *_ in answers]
    return _undisturbed[case]


def place_of(where, names):
    """The number of a place in what a worker communicates."""
    passes = {FORWARD: "activation", BACKWARD: "gradient"}
    if where in passes:
        return next(i for i, name in enumerate(names) if name.startswith(passes[where]))
    return {
        BEFORE: -1,
        BEFORE_LAST: len(names) - 2,
        LAST: len(names) - 1,
        UPDATE: None,
    }[where]


@pytest.mark.parametrize(("case", "where", "rank", "dies"), some(ALL, always=[]))
def test_a_step_counts_or_leaves_no_trace(case, where, rank, dies):
    states, communication = undisturbed(case)
    place = place_of(where, communication[rank])
    group = Ranks(workers_of(case))
    try:
        answers = group.answers(
            f"{ATOMIC}:until", case, STEP, rank, place, dies, silent={rank} if dies else ()
        )
    finally:
        group.stop()
    stood = set()
    for other, (done, value) in enumerate(answers):
        if other == rank and dies:
            continue
        assert done, value
        state, standing, torn, error = value
        assert not torn
        assert f"worker {rank}" in error if other != rank else "this worker fails" in error
        assert state == states[other][standing]
        stood.add(standing)
    # Those that have all they wait for end the step, while others may not have.
    assert stood <= ({STEP} if where in (BEFORE, FORWARD, BACKWARD) else {STEP, STEP + 1})
