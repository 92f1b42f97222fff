"""A step in which a worker dies counts on each of the others, or leaves no trace."""

from __future__ import annotations

import pytest

from tests.harness.groups import GROUPS
from tests.harness.ranks import Ranks
from tests.harness.tiers import exhaustive, some
from tests.strategy.comparison import PACKAGE, behaviours, check_same_as_alone

ATOMIC = f"{PACKAGE}.atomic"
STEP = 5  # The one that dies: with accumulation, the second that updates weights.
FIRST, SECOND, THIRD, BEFORE_LAST, LAST, UPDATE = 0, 1, 2, -2, -1, None

# The steps' collectives begin with the number of rows. In most cases the metrics come second, and
# then the gradients.
CASES = {
    "plain": (FIRST, SECOND, THIRD, LAST, UPDATE),
    "accumulation": (SECOND, LAST, UPDATE),
    "loss scaling": (THIRD, LAST, UPDATE),
    "large variables": (LAST, UPDATE),
    "averages": (LAST, UPDATE),
    "int8": (THIRD, LAST, UPDATE),
    "topk": (THIRD, LAST, UPDATE),
    "powersgd": (THIRD, LAST),
    "sharded": (THIRD, BEFORE_LAST, LAST, UPDATE),
    "sharded accumulation": (BEFORE_LAST, LAST),
    "sharded loss scaling": (BEFORE_LAST, LAST),
    "several steps": (FIRST, LAST, UPDATE),
    "two optimizers": (THIRD, BEFORE_LAST, LAST, UPDATE),
    "iterations read": (THIRD, LAST),
    "eager": (THIRD, BEFORE_LAST, UPDATE),
    "eager two optimizers": (THIRD, BEFORE_LAST),
}
ALL = [(case, where, 2) for case, places in CASES.items() for where in places]
ALL += [("plain", where, 3) for where in (THIRD, LAST, UPDATE)]
ALL += [("two optimizers", BEFORE_LAST, 3)]

_undisturbed = {}


def undisturbed(case, workers):
    """The states of a training in which nobody dies, by rank, and the collectives of `STEP`."""
    if (case, workers) not in _undisturbed:
        group = Ranks(workers)
        # The steps of one execution are not seen from outside; their results are the same.
        answers = group.run(f"{ATOMIC}:undisturbed", case.replace("several steps", "plain"))
        group.stop()
        assert all(standing == len(states) - 1 for states, _, standing in answers)
        _undisturbed[case, workers] = [states for states, _, _ in answers], answers[0][1][STEP]
    return _undisturbed[case, workers]


@pytest.mark.parametrize(("case", "where", "workers"), some(ALL, always=[("plain", LAST, 2)]))
def test_a_step_counts_or_leaves_no_trace(case, where, workers):
    states, collectives = undisturbed(case, workers)
    place = None if where is UPDATE else collectives[where]
    group = Ranks(workers)
    try:
        answers = group.answers(f"{ATOMIC}:until", case, STEP, place, silent={1})
    finally:
        group.stop()
    for rank in set(range(workers)) - {1}:
        done, value = answers[rank]
        assert done, value
        state, standing, torn = value
        assert not torn
        assert state == states[rank][standing]
        # Those that have all they wait for end the step, while others may not have.
        assert standing == STEP + 1 if where is UPDATE else standing in (STEP, STEP + 1)


@exhaustive
@pytest.mark.parametrize("behaviour", behaviours("atomic"))
def test_a_late_update_changes_no_result(behaviour):
    check_same_as_alone("2", behaviour)


@exhaustive
def test_a_variable_made_from_what_its_step_updates_is_refused():
    for message in GROUPS["2"].run(f"{ATOMIC}:made_from_what_is_updated", None):
        assert "Create the variable before the first step." in message
