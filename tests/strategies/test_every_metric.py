"""All of Keras's metrics have the result of one process, wherever they were made."""

import pytest

from tests.groups import GROUPS
from tests.strategies.comparison import PACKAGE, check_same_as_alone
from tests.tiers import exhaustive


@pytest.mark.parametrize("inside", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_every_metric(inside):
    check_same_as_alone("2", "every_metric:every_metric", inside)


@exhaustive
@pytest.mark.parametrize("group", ["2", "2x2"])
def test_made_outside_of_the_scope(group):
    check_same_as_alone(group, "every_metric:made_outside_of_the_scope")


@exhaustive
def test_of_a_train_step():
    check_same_as_alone("2", "every_metric:of_a_train_step")


@exhaustive
def test_what_is_no_sum_is_told():
    told = {"highest": 1, "last": 1, "moving": 1, "one": 1, "count": 0, "where": 0, "reset": 0}
    assert GROUPS["2"].run(f"{PACKAGE}.every_metric:what_is_no_sum") == [told, told]
