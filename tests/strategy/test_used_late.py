"""Layers and variables that only a step uses are trained as in one process."""

import itertools

import pytest

from tests.harness.tiers import exhaustive, some, spread
from tests.strategy.behaviours.used_late import OPTIMIZERS, WAYS
from tests.strategy.comparison import check_same_as_alone

SHARDED = ["Adam", "scaled", "accumulating", "averaged", "accumulating and averaged"]
CASES = [
    *((name, way, False) for name, way in itertools.product(OPTIMIZERS, WAYS)),
    *((name, way, True) for name, way in itertools.product(SHARDED, WAYS)),
]
USUAL = [("Adam", "step by step", True)]
COVERING = [
    *((*pair, False) for pair in spread(list(OPTIMIZERS), list(WAYS), 2)),
    *((*pair, True) for pair in spread(SHARDED, list(WAYS), 2)),
]


@pytest.mark.parametrize(
    ("optimizer", "way", "sharded"), some(CASES, always=USUAL, covering=COVERING)
)
def test_two_workers_give_the_result_of_one_process(optimizer, way, sharded):
    check_same_as_alone("2", "used_late:trained", optimizer, way, sharded)


@exhaustive
@pytest.mark.parametrize("group", ["1", "1x2", "3"])
@pytest.mark.parametrize("optimizer", ["Adam", "several"])
def test_other_groups_give_the_result_of_one_process(group, optimizer):
    check_same_as_alone(group, "used_late:trained", optimizer, "step by step", False)
