"""Every kind of input gives the result of one process, however its batches divide."""

import pytest

from tests.groups import OTHER_GROUPS
from tests.strategies.comparison import behaviours, check_same_as_alone
from tests.tiers import rotating

INPUTS = behaviours("inputs")
ON_GROUPS = [
    "inputs:last_batch_does_not_divide",
    "inputs:fewer_rows_than_workers",
    "inputs:plain_batch_normalization_with_fewer_rows",
]


@pytest.mark.parametrize("kind", INPUTS)
def test_two_workers(kind):
    check_same_as_alone("2", kind)


@pytest.mark.parametrize(("kind", "group"), rotating(ON_GROUPS, OTHER_GROUPS))
def test_groups(group, kind):
    check_same_as_alone(group, kind)


@pytest.mark.parametrize("group", ["3", "4"])
def test_uneven_pipelines(group):
    check_same_as_alone(group, "inputs:different_numbers_of_batches")
