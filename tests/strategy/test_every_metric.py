"""All of Keras's metrics have the result of one process, wherever they were made."""

import pytest

from tests.harness.tiers import exhaustive
from tests.strategy.comparison import check_same_as_alone


@exhaustive
@pytest.mark.parametrize("inside", [False, True])
def test_every_metric_gives_the_result_of_one_process(inside):
    check_same_as_alone("2", "every_metric:every_metric", inside)


@exhaustive
@pytest.mark.parametrize("group", ["2", "2x2"])
def test_made_outside_of_the_scope(group):
    check_same_as_alone(group, "every_metric:made_outside_of_the_scope")


@exhaustive
def test_of_a_train_step():
    check_same_as_alone("2", "every_metric:of_a_train_step")


@exhaustive
def test_state_that_is_no_sum():
    check_same_as_alone("2", "every_metric:what_is_no_sum")
