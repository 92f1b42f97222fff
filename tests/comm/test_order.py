"""What ranks call differently is an error on all of them that names both sides."""

from __future__ import annotations

import re

import pytest

from tests.harness.groups import GROUPS
from tests.harness.ranks import Ranks
from tests.harness.tiers import some

BEHAVIOURS = "tests.comm.order_behaviours"


@pytest.fixture
def group():
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.mark.parametrize(
    "where", some(["eager", "a function", "a replica", "outside of replicas"], ["a replica"])
)
def test_another_order_without_names(group, where):
    for said in group.run(f"{BEHAVIOURS}:of_two_sums", where):
        assert said.startswith("FailedPreconditionError")
        places = re.findall(r"all_reduce '(order_behaviours\.py:\d+)' float32\[3\] sum", said)
        assert len(set(places)) == 2
        assert "called at different places" in said


@pytest.mark.parametrize(
    "where", some(["a replica", "outside of replicas"], ["outside of replicas"])
)
def test_a_sum_on_one_and_a_mean_on_another(group, where):
    for said in group.run(f"{BEHAVIOURS}:sum_and_mean", where):
        assert said.startswith("FailedPreconditionError")
        assert "all_reduce 'mean at order_behaviours.py:" in said
        assert "all_reduce 'order_behaviours.py:" in said


@pytest.mark.parametrize("kind", some(["all_gather", "all_to_all"], ["all_gather"]))
def test_other_trailing_dimensions(group, kind):
    for said in group.run(f"{BEHAVIOURS}:other_trailing_dimensions", kind):
        assert said.startswith("FailedPreconditionError")
        assert f"{kind} 'rows' float32[4,3]" in said
        assert f"{kind} 'rows' float32[6,4]" in said
        assert "only in the first dimension" in said


def test_other_lines_that_stay_legal():
    for totals in GROUPS["2"].run(f"{BEHAVIOURS}:what_stays_legal"):
        assert totals == [6.0, 1.0, 6.0, 6.0, 6.0]


@pytest.mark.parametrize("group", ["2", "2 hosts"])
def test_rows_without_values_are_rows(group):
    for shapes, counts in GROUPS[group].run(f"{BEHAVIOURS}:empty_rows"):
        assert shapes == [[9, 0], [9, 0, 2], [2, 9, 0], [9, 0]]
        assert counts == [4, 5]
