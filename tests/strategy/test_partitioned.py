"""Steps that are partitioned from their programs for the whole batch."""

import pytest

from tests.harness.groups import GROUPS
from tests.harness.references import reference
from tests.harness.tiers import exhaustive
from tests.strategy.comparison import PACKAGE, assert_close, check_same_as_alone

GROUPS_OF_DEVICES = ["2", *(pytest.param(group, marks=exhaustive) for group in ("3", "2x2", "1x2"))]


@exhaustive
@pytest.mark.parametrize("group", GROUPS_OF_DEVICES)
def test_no_value_is_made_up(group):
    check_same_as_alone(group, "partitioned:lookup_of_one_row")


@pytest.mark.parametrize("group", GROUPS_OF_DEVICES)
def test_eager_steps_give_the_result_of_one_process(group):
    check_same_as_alone(group, "partitioned:eagerly_on_the_whole_batch")


def test_what_a_step_communicates():
    for found in GROUPS["2"].run(f"{PACKAGE}.partitioned:explained"):
        assert {kind for kind, _, _ in found["sums"]} == {"reduce"}
        assert any(size == 4 and "partitioned.py:" in where for _, size, where in found["sums"])
        gathered = [(size, where) for kind, size, where in found["rows"] if kind == "gather"]
        # The targets of all rows, for the products of each with its own.
        assert any(size == 6 * 3 * 4 and "partitioned.py:" in where for size, where in gathered)
        # Of each worker, the number of its rows, and the mean and variance of three features.
        assert [size for kind, size, _ in found["statistics"] if kind == "gather"] == [2 * 7 * 4]
        moments = ("moments", (2, 7), "statistics of each replica")
        assert moments in found["statistics, reasons"]


@exhaustive
@pytest.mark.parametrize(
    ("group", "replicas", "jit_compile"),
    [("2", 2, False), ("3", 3, True), ("2x2", 4, False), ("1x2", 2, False), ("2x2", 4, True)],
)
def test_replicas_normalize_their_rows(group, replicas, jit_compile):
    check_same_as_alone(group, "partitioned:statistics_of_replicas", replicas, jit_compile)


def test_effects_happen_once():
    expected, written, lines = reference(f"{PACKAGE}.partitioned:summaries_and_prints")
    first, second = GROUPS["2"].run(f"{PACKAGE}.partitioned:summaries_and_prints")
    for rank, (result, _, _) in enumerate((first, second)):
        assert_close(result, expected, f"rank {rank}")
    assert first[1:] == (written, lines)
    assert second[1:] == (0, 0)
