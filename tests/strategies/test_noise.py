"""Noise of every kind is what one process draws; what cannot be so is told."""

import pytest

from tests.strategies.comparison import check_same_as_alone
from tests.tiers import exhaustive, some


@pytest.mark.parametrize(
    "behaviour",
    some(
        ["every_distribution", "batches_of_a_fixed_size", "mixed_rows", "state_of_other_types"],
        always=["every_distribution"],
    ),
)
def test_two_workers(behaviour):
    check_same_as_alone("2", f"noise:{behaviour}")


@exhaustive
@pytest.mark.parametrize("eagerly", [False, True])
def test_functions_traced_before_the_step(eagerly):
    check_same_as_alone("2", "noise:functions_traced_before_the_step", eagerly)


@exhaustive
@pytest.mark.parametrize("behaviour", ["shuffles", "mixed_after_a_layer"])
def test_coupled_rows(behaviour):
    check_same_as_alone("2", f"noise:{behaviour}")
