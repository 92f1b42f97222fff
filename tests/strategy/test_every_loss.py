"""All of Keras's losses have the result of one process, also those that couple rows."""

import pytest

from tests.harness.tiers import exhaustive
from tests.strategy.comparison import check_same_as_alone


@pytest.mark.parametrize(
    ("reduction", "weighted"),
    [
        pytest.param("sum_over_batch_size", False, marks=pytest.mark.exhaustive),
        pytest.param("mean_with_sample_weight", True, marks=pytest.mark.exhaustive),
        pytest.param("sum_over_batch_size", True, marks=pytest.mark.exhaustive),
        pytest.param("sum", True, marks=pytest.mark.exhaustive),
        pytest.param("none", True, marks=pytest.mark.exhaustive),
    ],
)
def test_every_loss_gives_the_result_of_one_process(reduction, weighted):
    check_same_as_alone("2", "every_loss:every_loss", reduction, weighted)


@exhaustive
def test_ratios_along_axes_and_in_functions():
    check_same_as_alone("2", "every_loss:ratios_along_axes_and_in_functions")


@exhaustive
def test_a_masked_ratio_gives_the_result_of_one_process():
    check_same_as_alone("2", "every_loss:masked_ratio")


@exhaustive
@pytest.mark.parametrize("group", ["2", pytest.param("2x2", marks=pytest.mark.exhaustive)])
def test_rows_that_two_workers_cannot_share(group):
    check_same_as_alone(group, "every_loss:rows_that_two_workers_cannot_share")


@exhaustive
def test_an_unreduced_circle_gives_the_result_of_one_process():
    check_same_as_alone("2", "every_loss:unreduced_circle")
