"""Every kind of input gives the result of one process, however its batches divide."""

import pytest

from tests.strategies.comparison import behaviours, check_same_as_alone

INPUTS = behaviours("inputs")


@pytest.mark.parametrize("kind", INPUTS)
def test_two_workers(kind):
    check_same_as_alone("2", kind)


@pytest.mark.parametrize("group", ["1", "2 by TensorFlow", "3", "4", "1x2", "2x2"])
@pytest.mark.parametrize(
    "kind",
    [
        "inputs:last_batch_does_not_divide",
        "inputs:fewer_rows_than_workers",
        "inputs:plain_batch_normalization_with_fewer_rows",
    ],
)
def test_groups(group, kind):
    check_same_as_alone(group, kind)


@pytest.mark.parametrize("group", ["3", "4"])
def test_uneven_pipelines(group):
    check_same_as_alone(group, "inputs:different_numbers_of_batches")
