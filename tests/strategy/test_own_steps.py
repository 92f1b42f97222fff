"""Steps of a model's own give the results of one process."""

import pytest

from tests.harness.tiers import exhaustive, some
from tests.strategy.comparison import behaviours, check_same_as_alone

ALL = behaviours("own_steps")


@pytest.mark.parametrize("behaviour", some(ALL, always=["own_steps:noise_in_predictions"]))
def test_two_workers_give_the_result_of_one_process(behaviour):
    check_same_as_alone("2", behaviour)


@pytest.mark.parametrize("first", some([5, 3], always=[]))
def test_a_later_trace_puts_the_update_where_the_first_one_did_not(first):
    check_same_as_alone("2", "own_steps:traces_that_decide_otherwise", first)


@exhaustive
@pytest.mark.parametrize("group", ["1", "3", "1x2", "2x2"])
@pytest.mark.parametrize("behaviour", ALL)
def test_other_groups_give_the_result_of_one_process(group, behaviour):
    check_same_as_alone(group, behaviour)
