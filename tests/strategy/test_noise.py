"""Noise of every kind is what one process draws; what cannot be so is told."""

import pytest

from tests.harness.groups import GROUPS
from tests.harness.tiers import exhaustive, some
from tests.strategy.comparison import PACKAGE, assert_equal, check_same_as_alone


@pytest.mark.parametrize(
    "behaviour",
    some(
        ["every_distribution", "batches_of_a_fixed_size", "mixed_rows", "state_of_other_types"],
        always=["every_distribution"],
    ),
)
def test_two_workers_draw_what_one_process_draws(behaviour):
    check_same_as_alone("2", f"noise:{behaviour}")


@exhaustive
@pytest.mark.parametrize("eagerly", [False, True])
def test_functions_traced_before_the_step(eagerly):
    check_same_as_alone("2", "noise:functions_traced_before_the_step", eagerly)


@exhaustive
@pytest.mark.parametrize("behaviour", ["shuffles", "mixed_after_a_layer"])
def test_rows_that_noise_couples_give_the_result_of_one_process(behaviour):
    check_same_as_alone("2", f"noise:{behaviour}")


@pytest.mark.parametrize("group", some(["2", "3", "1x2", "2 by TensorFlow"], always=["2"]))
def test_without_seeds_all_workers_have_the_same(group):
    first, *others = GROUPS[group].run(f"{PACKAGE}.noise:without_seeds")
    for other in others:
        assert_equal(other, first, "what the workers have drawn")
