"""Steps and rows are recorded once, however the model is trained."""

from __future__ import annotations

import pytest

from tests.harness.groups import GROUPS
from tests.harness.tiers import exhaustive

RECORDED = "tests.monitoring.behaviours:recorded"
HOWS = [
    "fit",
    "untimed",
    "several steps",
    "several steps eagerly",
    "of unknown length",
    "by hand",
    "eagerly",
]


@exhaustive
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("group", ["1", "2", "2x2", "2 by TensorFlow", "3"])
def test_every_step_and_row_counts_once(group, how):
    results = GROUPS[group].run(RECORDED, how)
    assert [steps for steps, _, _ in results] == [18] * len(results)
    assert sum(rows for _, rows, _ in results) == 3 * 43
    timed = 0 if how in ("untimed", "by hand") else 18
    assert [durations for _, _, durations in results] == [timed] * len(results)


@exhaustive
def test_workers_that_read_apart_count_their_own_rows():
    # As many steps as there are global batches, each with 4 rows of each worker.
    assert GROUPS["2"].run(RECORDED, "apart") == [(18, 18 * 4, 18)] * 2


@exhaustive
@pytest.mark.parametrize("group", ["2", "4"])
def test_the_last_stage_counts_the_rows(group):
    results = GROUPS[group].run(RECORDED, "pipeline")
    rows = [rows for _, rows, _ in results]
    assert sum(rows) == 3 * 43
    assert rows.count(0) == len(rows) // 2
    assert [(steps, times) for steps, _, times in results] == [(18, 18)] * len(results)


@exhaustive
def test_other_trainings_do_not_count():
    assert GROUPS["1"].run("tests.monitoring.behaviours:alone") == [0]


@exhaustive
def test_bytes_of_closed_groups_are_kept():
    for before, after in GROUPS["2 hosts"].run("tests.monitoring.behaviours:several_groups"):
        assert 0 < before <= after
