"""Variables outside of the scope that a step reads are compared; others may differ."""

import itertools

import pytest

from tests.harness.groups import GROUPS
from tests.harness.tiers import exhaustive, some
from tests.strategy.behaviours.outer_state import COUNTS
from tests.strategy.comparison import PACKAGE, check_same_as_alone

DIFFERS = f"{PACKAGE}.outer_state:differs"
CALLS = ["epoch", "fit", "evaluate", "predict", "train_on_batch"]


@pytest.mark.parametrize(
    ("how", "call"),
    some(itertools.product([*COUNTS, "generator"], CALLS), always=[("factor", "epoch")]),
)
def test_a_variable_that_one_worker_assigns_is_found(how, call):
    check_found("2", how, call)


@exhaustive
@pytest.mark.parametrize("group", ["3", "2x2", "2 by TensorFlow"])
def test_other_groups_compare_what_steps_read(group):
    check_found(group, "factor", "epoch")
    check_found(group, "written", "evaluate")


def check_found(group, how, call):
    name = {"generator": "StateVar", "index": "number"}.get(how, "beta")
    for said in GROUPS[group].run(DIFFERS, how, call):
        assert said.startswith("The workers have different values of a variable")
        assert f"the variable {name!r} differs between worker 0" in said


@pytest.mark.parametrize("group", some(["2", "3", "2x2"], always=[]))
def test_what_no_result_depends_on_may_differ(group):
    check_same_as_alone(group, "outer_state:may_differ")
