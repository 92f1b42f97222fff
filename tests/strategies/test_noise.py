"""Noise of every kind is what one process draws; what cannot be so is told."""

import pytest

from tests.groups import GROUPS
from tests.strategies.comparison import PACKAGE, check_same_as_alone
from tests.tiers import some


@pytest.mark.parametrize(
    "behaviour",
    some(
        ["every_distribution", "batches_of_a_fixed_size", "mixed_rows", "state_of_other_types"],
        always=["every_distribution", "mixed_rows"],
    ),
)
def test_two_workers(behaviour):
    check_same_as_alone("2", f"noise:{behaviour}")


@pytest.mark.parametrize("eagerly", some([False, True], always=[False]))
def test_functions_traced_before_the_step(eagerly):
    check_same_as_alone("2", "noise:functions_traced_before_the_step", eagerly)


def test_shuffles_of_rows_are_told():
    assert GROUPS["2"].run(f"{PACKAGE}.noise:shuffles") == [{0: 1, 1: 0}] * 2


def test_rows_are_mixed_before_all_that_is_trained():
    for said in GROUPS["2"].run(f"{PACKAGE}.noise:mixed_after_a_layer"):
        assert "apply them to the inputs of a model" in said
