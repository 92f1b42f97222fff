"""Where a step fails on one worker, all of them raise soon and say which worker it was and why."""

from __future__ import annotations

import pytest

from tests.harness.groups import GROUPS
from tests.harness.ranks import Ranks
from tests.harness.tiers import exhaustive, some
from tests.strategy.comparison import PACKAGE

FAILING = f"{PACKAGE}.failing_steps"
# The deadline of a collective is 200 s.
SOON = 100


@pytest.fixture
def pair(request):
    ranks = Ranks(2, **getattr(request, "param", {}))
    yield ranks
    ranks.stop()


def check(answers, cause):
    (here, mine), (there, theirs) = [answer for _, answer in answers]
    assert cause in there
    assert "worker 1 (127.0.0.1:" in here
    assert cause in here
    assert max(mine, theirs) < SOON


@pytest.mark.parametrize(
    "behaviour", some(["in_a_graph", "eagerly", "several_steps_at_once"], ["eagerly"])
)
def test_a_failure_in_fit_is_raised_on_all_workers(pair, behaviour):
    check(pair.answers(f"{FAILING}:{behaviour}"), "this layer is worn out")


@pytest.mark.parametrize(
    "kind", some(["a loop in a function", "a function per step", "eager"], ["a loop in a function"])
)
def test_in_a_loop_of_ones_own(pair, kind):
    check(pair.answers(f"{FAILING}:own_loop", kind), "this layer is worn out")


@pytest.mark.parametrize("kind", some(["alone", "in a loop", "while it is traced"], ["in a loop"]))
def test_beside_a_collective_that_waits(pair, kind):
    answers = pair.answers(f"{FAILING}:beside_a_collective", kind)
    check(answers, "this disk is full")


@exhaustive
@pytest.mark.parametrize("pair", [{"native": False}], indirect=True, ids=["by TensorFlow"])
@pytest.mark.parametrize("behaviour", ["in_a_graph", "eagerly"])
def test_a_failure_with_tensorflows_collectives_is_raised_on_all_workers(pair, behaviour):
    check(pair.answers(f"{FAILING}:{behaviour}"), "this layer is worn out")


def test_all_fail_alike():
    for refused, total in GROUPS["2"].run(f"{FAILING}:alike_on_all"):
        assert all(message != "no error" for message in refused)
        assert "too much" in refused[-1]
        assert total == [2.0, 2.0, 2.0]


def test_the_end_of_the_data_is_no_failure():
    for ended, total in GROUPS["2"].run(f"{FAILING}:at_the_end_of_the_data"):
        assert ended == ["OutOfRangeError"] * 3
        assert total == 2.0
