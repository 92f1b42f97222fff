"""Models that are built in a step, or for the first prediction, leave Keras as in one process."""

import itertools

import pytest

from tests.harness.tiers import some
from tests.strategy.comparison import behaviours, check_same_as_alone

ALL = behaviours("unbuilt")
THEN = ["subclassed", "functional"]
GROUPS = ["1", "2", "1x2", "2x2"]


@pytest.mark.parametrize(
    ("group", "then"),
    some(itertools.product(GROUPS, THEN), always=[]),
)
def test_models_after_two_that_predict_has_built(group, then):
    check_same_as_alone(group, "unbuilt:predicted", then)


@pytest.mark.parametrize(("group", "behaviour"), some(itertools.product(GROUPS, ALL), always=[]))
def test_models_built_by_a_step(group, behaviour):
    check_same_as_alone(group, behaviour)
