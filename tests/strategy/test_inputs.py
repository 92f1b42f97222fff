"""Every kind of input gives the result of one process, however its batches divide."""

import itertools

import pytest

from tests.harness.groups import OTHER_GROUPS
from tests.harness.tiers import exhaustive, some
from tests.strategy.comparison import behaviours, check_same_as_alone

INPUTS = behaviours("inputs")
ON_GROUPS = [
    "inputs:fewer_rows_than_workers",
    "inputs:plain_batch_normalization_with_fewer_rows",
    "inputs:graphs",
]


# By default.
USUAL = [
    "inputs:last_batch_does_not_divide",
    "inputs:different_numbers_of_batches",
    "inputs:files_are_read_once",
    "inputs:files_that_are_preprocessed_by_rows",
    "inputs:rows_in_any_order",
    "inputs:seeds_without_a_common_seed",
]
OLDEST = [
    "inputs:last_batch_does_not_divide",
    "inputs:first_batch_does_not_divide",
]


@pytest.mark.parametrize("kind", some(INPUTS, always=USUAL, oldest=OLDEST))
def test_two_workers_give_the_result_of_one_process(kind):
    check_same_as_alone("2", kind)


@exhaustive
@pytest.mark.parametrize(
    ("kind", "group"),
    list(itertools.product(ON_GROUPS, OTHER_GROUPS)),
)
def test_other_groups_give_the_result_of_one_process(group, kind):
    check_same_as_alone(group, kind)


@exhaustive
@pytest.mark.parametrize("group", ["3", "4"])
def test_datasets_of_different_lengths_end_together(group):
    check_same_as_alone(group, "inputs:different_numbers_of_batches")
