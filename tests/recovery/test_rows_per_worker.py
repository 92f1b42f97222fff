"""Each worker keeps its rows of a batch when their number changes; every row is trained once."""

import pytest

from tests.harness.references import reference
from tests.harness.tiers import exhaustive
from tests.recovery.test_surviving import SURVIVING
from tests.strategy.comparison import assert_close, assert_equal

REDRAWN = "tests.recovery.behaviours.redrawn:redrawn"
PER_WORKER = {"elastic": {"batch": "per_worker"}}


def check(answers, survivors, workers, settings, tolerance=1e-5):
    """All that are left have what one process has that trains the same batches."""
    expected = reference(REDRAWN, settings, workers)
    results = {}
    for rank in survivors:
        done, results[rank] = answers[rank]
        assert done, results[rank]
        for what in ("weights", "history", "epochs"):
            assert_close(results[rank][what], expected[what], f"rank {rank}: {what}", tolerance)
        assert_equal(results[rank]["weights"], results[survivors[0]]["weights"], f"rank {rank}")
    return results, expected


def lose(start, number, faults, workers, settings=None):
    settings = settings or {}
    answers = start(number).answers(
        f"{SURVIVING}:trained", {**settings, **PER_WORKER}, faults, silent=set(faults)
    )
    survivors = [rank for rank in range(number) if rank not in faults]
    results, expected = check(answers, survivors, [(0, number), *workers], settings)
    for result in results.values():
        assert without_empty(result["events"]) == expected["events"]


def came_after(answers):
    """After which step a worker came."""
    done, result = answers[0]
    assert done, result
    return result["changed after"][-1]


def without_empty(events):
    """The events without the batches that Keras begins where data of unknown length has ended."""
    followed = zip(events, [*events[1:], None], strict=True)
    return [
        event
        for event, then in followed
        if event[0] != "batch" or (then is not None and then[0] == "batch ended")
    ]


@exhaustive
@pytest.mark.parametrize(
    ("phase", "step", "after"),
    [
        ("backward", 0, 0),
        ("backward", 1, 1),
        ("backward", 6, 6),
        ("backward", 7, 7),
        ("backward", 10, 10),
        ("before", 10, 10),
        ("after", 10, 10),
        ("after", 7, 7),
        ("evaluation", 10, 14),
        ("epoch end", 10, 14),
        ("backward", 20, 20),
    ],
)
def test_a_worker_is_lost(start, phase, step, after):
    lose(start, 3, {1: (phase, step, "kill")}, [(after, 2)])


@exhaustive
@pytest.mark.parametrize("step", [7, 10])
@pytest.mark.parametrize(
    "data", ["weighted", "cached", "arrays", "generator dataset", "generator", "PyDataset"]
)
def test_kinds_of_data(start, data, step):
    lose(start, 3, {1: ("backward", step, "kill")}, [(step, 2)], {"data": data})


@exhaustive
@pytest.mark.parametrize(
    "settings",
    [
        {"steps_per_epoch": 5},
        {"steps_per_execution": 3},
        {"steps_per_epoch": 5, "steps_per_execution": 2},
        {"optimizer": {"gradient_accumulation_steps": 3}},
        {"scaled": True},
    ],
)
@pytest.mark.parametrize("step", [5, 8])
def test_ways_to_train(start, settings, step):
    lose(start, 3, {1: ("backward", step, "kill")}, [(step, 2)], settings)


@exhaustive
def test_two_are_lost_one_after_the_other(start):
    faults = {0: ("before", 9, "kill"), 2: ("backward", 12, "kill")}
    lose(start, 4, faults, [(9, 3), (12, 2)])


@exhaustive
@pytest.mark.parametrize("settings", [{}, {"data": "generator dataset"}, {"scaled": True}])
@pytest.mark.parametrize("step", [1, 4, 7, 10, 16])
def test_a_worker_comes(start, tmp_path, step, settings):
    ranks = start(3, strategy=False)
    arguments = [0, 1], step, {}, str(tmp_path / "come"), {**settings, **PER_WORKER}
    answers = ranks.answers(f"{SURVIVING}:coming", *arguments)
    check(answers, [0, 1, 2], [(0, 2), (came_after(answers), 3)], settings)


@exhaustive
@pytest.mark.parametrize("settings", [{}, {"data": "generator dataset"}])
def test_a_worker_is_lost_and_another_one_comes(start, tmp_path, settings):
    ranks = start(4, strategy=False)
    faults = {1: ("backward", 8, "kill")}
    arguments = [0, 1, 2], 12, faults, str(tmp_path / "come"), {**settings, **PER_WORKER}
    answers = ranks.answers(f"{SURVIVING}:coming", *arguments, silent={1})
    workers = [(0, 3), (8, 2), (came_after(answers), 3)]
    results, expected = check(answers, [0, 2, 3], workers, settings)
    for rank in (0, 2):
        assert results[rank]["changes"] == [(3, 2), (2, 3)]
        assert without_empty(results[rank]["events"]) == expected["events"]


@exhaustive
def test_what_too_few_have_is_drawn_on_by_others(start, tmp_path):
    """A snapshot after a change says how others draw batches on from there."""
    settings = {"snapshots": str(tmp_path), "elastic": {"min_workers": 2, "batch": "per_worker"}}
    faults = {2: ("before", 3, "kill"), 1: ("before", 11, "kill")}
    answers = start(3).answers(
        f"{SURVIVING}:trained", {**settings, "patience": 10.0}, faults, silent={1, 2}
    )
    assert not answers[0][0]
    assert "1 of at least 2 workers remain" in answers[0][1]
    answers = start(2).answers(f"{SURVIVING}:trained", settings, {})
    check(answers, [0, 1], [(0, 3), (3, 2)], {})
