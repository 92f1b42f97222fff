"""Optimizers inside of others, side by side, and with methods of their own."""

from __future__ import annotations

import pytest

from tests.harness.groups import GROUPS
from tests.harness.references import reference
from tests.harness.tiers import exhaustive, some
from tests.strategy.comparison import PACKAGE, assert_close, assert_equal, check_same_as_alone


def check(group, behaviour, *args):
    check_same_as_alone(group, f"other_optimizers:{behaviour}", *args)


def run(behaviour):
    return GROUPS["2"].run(f"{PACKAGE}.other_optimizers:{behaviour}")


@exhaustive
@pytest.mark.parametrize("scaled", [False, True])
def test_several_in_one(scaled):
    check("2", "several_in_one", scaled)


@exhaustive
def test_several_in_one_on_several_devices():
    check("1x2", "several_in_one", True)


@exhaustive
def test_several_in_one_compressed():
    exact = reference(f"{PACKAGE}.other_optimizers:several_in_one", True)
    results = GROUPS["2 hosts"].run(f"{PACKAGE}.other_optimizers:several_in_one_compressed")
    for result in results:
        assert_close(result, exact, "compressed", tolerance=1e-2)
        assert_equal(result.get("weights"), results[0].get("weights"), "compressed")


@pytest.mark.parametrize(
    ("scaled", "one"),
    some([((0, 1), False), ((), False), ((0,), True), ((0, 1), True)], always=[]),
    ids=str,
)
def test_losses_scaled_or_not(scaled, one):
    check("2", "losses_scaled_or_not", scaled, one)


@pytest.mark.parametrize(
    "kind",
    some(
        [
            "SignOfItsOwn",
            "PairsOfItsOwn",
            "UpdatesOfItsOwn",
            "Normalizing",
            "ClippingByItself",
            "Around",
        ],
        always=["UpdatesOfItsOwn"],
    ),
)
def test_methods_of_its_own(kind):
    check("2", "methods_of_its_own", kind)


@exhaustive
@pytest.mark.parametrize("kind", ["Normalizing", "ClippingByItself"])
def test_methods_of_its_own_with_accumulation(kind):
    check("2", "methods_of_its_own", kind, True)


@exhaustive
@pytest.mark.parametrize("group", ["2 by TensorFlow", "3", "1x2"])
@pytest.mark.parametrize(
    "behaviour",
    [
        ("methods_of_its_own", "PairsOfItsOwn", False, True),
        ("methods_of_its_own", "ClippingByItself", True, False),
        ("losses_scaled_or_not", (0, 1), False),
        ("float8",),
    ],
    ids=str,
)
def test_other_groups_give_the_result_of_one_process(group, behaviour):
    check(group, *behaviour)


@pytest.mark.parametrize(
    "behaviour",
    some(
        ["updates_by_hand", "clipped_in_the_backward_pass", "float8"],
        always=["updates_by_hand"],
    ),
)
def test_two_workers_give_the_result_of_one_process(behaviour):
    check("2", behaviour)


@exhaustive
@pytest.mark.parametrize("own_step", [False, True])
def test_no_rows_while_accumulating(own_step):
    check("2", "no_rows_while_accumulating", own_step)


@exhaustive
def test_float8_in_an_own_step():
    check_same_as_alone("2", "other_optimizers:float8_in_an_own_step")


def test_applied_outside_of_replicas():
    for errors in run("applied_outside"):
        for error in errors:
            assert error.startswith("UnsupportedError") and "`strategy.run`" in error, errors


def test_shards_that_nobody_sums():
    for message in run("shards_that_nobody_sums"):
        assert message.startswith("UnsupportedError") and "Received: Elementwise" in message
