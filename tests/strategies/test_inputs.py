"""Every kind of input gives the result of one process, however its batches divide."""

import itertools

import pytest

from tests.groups import OTHER_GROUPS
from tests.strategies.comparison import behaviours, check_same_as_alone
from tests.tiers import some

INPUTS = behaviours("inputs")
ON_GROUPS = [
    "inputs:last_batch_does_not_divide",
    "inputs:fewer_rows_than_workers",
    "inputs:plain_batch_normalization_with_fewer_rows",
    "inputs:graphs",
]


# By default.
USUAL = [
    "inputs:last_batch_does_not_divide",
    "inputs:shuffled_py_dataset",
    "inputs:datasets_from_function",
    "inputs:different_numbers_of_batches",
    "inputs:files_are_read_once",
    "inputs:predictions_from_files_keep_their_order",
    "inputs:graphs",
    "inputs:batches_beside_batches",
]


@pytest.mark.parametrize("kind", some(INPUTS, always=USUAL))
def test_two_workers(kind):
    check_same_as_alone("2", kind)


@pytest.mark.parametrize(
    ("kind", "group"),
    some(
        itertools.product(ON_GROUPS, OTHER_GROUPS),
        always=[
            ("inputs:last_batch_does_not_divide", "2 by TensorFlow"),
            ("inputs:plain_batch_normalization_with_fewer_rows", "3"),
        ],
    ),
)
def test_groups(group, kind):
    check_same_as_alone(group, kind)


@pytest.mark.parametrize("group", some(["3", "4"], always=["3"]))
def test_uneven_pipelines(group):
    check_same_as_alone(group, "inputs:different_numbers_of_batches")
