"""Each worker preprocesses only its own rows, and the batches stay those of one process."""

import pytest

from tests.harness.groups import GROUPS, OTHER_GROUPS
from tests.harness.tiers import exhaustive, some
from tests.strategy.comparison import PACKAGE, behaviours, check_same_as_alone

_REPORTS = [f"division:{name}" for name in ("rows_processed", "depends_on_calls", "random_targets")]
KINDS = [kind for kind in behaviours("division") if kind not in _REPORTS]
USUAL = ["division:mapped", "division:own_loop", "division:fewer_rows_than_workers"]


@pytest.mark.parametrize("kind", some(KINDS, always=USUAL))
def test_two_workers_give_the_result_of_one_process(kind):
    check_same_as_alone("2", kind)


@exhaustive
@pytest.mark.parametrize("group", OTHER_GROUPS)
@pytest.mark.parametrize("kind", KINDS)
def test_other_groups_give_the_result_of_one_process(group, kind):
    check_same_as_alone(group, kind)


@pytest.mark.parametrize("group", some(["2", "3"], always=["2"]))
def test_each_row_is_processed_by_one_worker(group):
    workers = int(group)
    for result in GROUPS[group].run(f"{PACKAGE}.division:rows_processed"):
        # Each worker processes its rows of each batch, and all rows of each epoch's first batch.
        assert result["rows"] == 2 * 48
        assert result["processed"] <= 2 * (48 // workers + 6 + 8)
        assert all(0 < share < 1 for share in result["logged"])


@exhaustive
def test_a_python_function_whose_results_depend_on_its_calls_is_refused():
    for said in GROUPS["2"].run(f"{PACKAGE}.division:depends_on_calls"):
        assert "A Python function in a `map` of the dataset gives other results" in said


@exhaustive
def test_targets_may_be_drawn():
    first, second = GROUPS["2"].run(f"{PACKAGE}.division:random_targets")
    assert first == second
