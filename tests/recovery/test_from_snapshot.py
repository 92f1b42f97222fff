"""No worker has the whole state any more: all go back to the last snapshot in their processes."""

from __future__ import annotations

import pytest

from tests.harness.references import reference
from tests.harness.tiers import exhaustive
from tests.recovery.behaviours.data_kinds import DATA, VALIDATION
from tests.strategy.comparison import assert_close, assert_equal

BEHAVIOURS = "tests.recovery.behaviours.from_snapshot"
AT_ONCE = [0, 3, 6, 7, 10, 13, 14]  # the steps that stand when three of an epoch's seven are run
WAITS = {"asynchronous": False}  # so that it is known which snapshot is the last
ONCE = {
    "generator": "a Python generator, which gives each batch once",
    "shuffling PyDataset": "a PyDataset that changes at the beginning or end of epochs",
}
SAME = ("data", "validation", "optimizer", "steps_per_execution", "steps_per_epoch", "policy")


def go_back(start, tmp_path, workers, faults, settings, snapshot, dead=(), **group):
    """Loses the state after the first fault; returns what the workers give that are left."""
    settings = {"folder": str(tmp_path / "here"), "every": 4, **settings}
    dead = {*faults, *dead}
    ranks = start(workers, **group)
    answers = ranks.answers(f"{BEHAVIOURS}:trained", settings, faults, silent=dead)
    survivors = [rank for rank in range(workers) if rank not in dead]
    return check(answers, survivors, settings, snapshot)


def check(answers, survivors, settings, snapshot):
    same = {key: value for key, value in settings.items() if key in SAME}
    expected = reference(f"{BEHAVIOURS}:trained", same, {})
    results = []
    for rank in survivors:
        done, result = answers[rank]
        assert done, result
        results.append(result)
    for result in results:
        for what in ("weights", "history", "epochs", "losses"):
            assert_close(result[what], expected[what], what, 1e-5)
        for what in ("weights", "slots"):
            assert_equal(result[what], results[0][what], what)
        assert result["left"] == []
    whole, [first, *_] = expected["batches"], results
    if snapshot is not None and first["begun"] > 1:
        # What is behind the snapshot comes once more, everything before it once.
        several = "steps_per_execution" in settings
        behind = AT_ONCE.index(snapshot) if several else snapshot
        again = max(at for at, seen in enumerate(first["batches"]) if seen == whole[behind])
        assert first["batches"][:again] == whole[:again]
        assert first["batches"][again:] == whole[behind:]
        assert f"all return to the snapshot of step {snapshot}: " in first["said"]
        assert several or f": {again - snapshot} steps are repeated." in first["said"]
    if "{}" not in settings["folder"]:  # Otherwise a new chief has a file of its own.
        rows = first["csv"].splitlines()
        assert [row.split(",")[0] for row in rows[1:]] == ["0", "1", "2"]
    return results


@exhaustive
@pytest.mark.parametrize("every", [1, 4, "epoch"])
@pytest.mark.parametrize(("workers", "victim"), [(2, 0), (2, 1), (3, 1)])
def test_whoever_is_lost(start, tmp_path, workers, victim, every):
    faults = {victim: ("before", 10, "kill")}
    settings = {"every": every, "asynchronous": False}
    snapshot = {1: 10, 4: 8, "epoch": 7}[every]
    for result in go_back(start, tmp_path, workers, faults, settings, snapshot):
        assert result["changes"] == [(workers, workers - 1)]
        assert result["begun"] == 2


@exhaustive
@pytest.mark.parametrize("phase", ["forward", "backward", "after", "evaluation", "epoch end"])
def test_in_whatever_phase(start, tmp_path, phase):
    go_back(start, tmp_path, 2, {1: (phase, 10, "kill")}, WAITS, 12 if phase[0] == "e" else 8)


@exhaustive
@pytest.mark.parametrize("step", [4, 5, 6, 7, 8, 13, 14, 20])
def test_at_any_step(start, tmp_path, step):
    go_back(start, tmp_path, 2, {1: ("before", step, "kill")}, WAITS, step // 4 * 4)


@exhaustive
@pytest.mark.parametrize(
    "settings",
    [
        {"steps_per_execution": 3, "every": 3},
        {"steps_per_epoch": 7},
        {"optimizer": {"use_ema": True}},
        {"optimizer": {"gradient_accumulation_steps": 3}},
        *({"data": data} for data in DATA if data not in ("dataset", *ONCE)),
    ],
)
def test_ways_to_train(start, tmp_path, settings):
    snapshot = 10 if "steps_per_execution" in settings else 8
    go_back(start, tmp_path, 3, {1: ("backward", 11, "kill")}, {**WAITS, **settings}, snapshot)


@exhaustive
@pytest.mark.parametrize("kind", VALIDATION)
@pytest.mark.parametrize(
    ("phase", "step", "every", "snapshot"),
    [
        ("before", 15, 4, 12),
        ("evaluation", 14, 4, 12),
        ("before", 10, 6, 6),
        ("before", 10, "epoch", 7),
    ],
)
def test_validation_reads_the_same_rows(start, tmp_path, kind, phase, step, every, snapshot):
    settings = {**WAITS, "validation": kind, "every": every}
    go_back(start, tmp_path, 2, {1: (phase, step, "kill")}, settings, snapshot)


@exhaustive
@pytest.mark.parametrize(
    "second",
    [("begun anew", 0), ("change", 0), ("before", 8), ("after", 8), ("before", 12)],
)
@pytest.mark.parametrize("losing", [1, 2])
def test_a_second_worker_is_lost_on_the_way_back(start, tmp_path, second, losing):
    faults = {2: ("before", 10, "kill")}
    settings = {**WAITS, "second": {0: (*second, "kill")}, "losing": losing}
    # Which snapshot is the last, and who says so, depends on what comes first.
    go_back(start, tmp_path, 3, faults, settings, None, dead={0})


@exhaustive
@pytest.mark.parametrize("victim", [0, 2])
def test_a_worker_is_lost_while_all_look_for_a_snapshot(start, tmp_path, victim):
    settings = {"losing": 0, "dies_looking": victim}
    results = go_back(start, tmp_path, 3, {}, settings, None, dead={victim})
    assert "no worker has trained a step yet" in results[0]["said"]
    for result in results:
        assert (result["changes"], result["begun"]) == ([(3, 2)], 2)


@exhaustive
def test_a_damaged_snapshot_is_passed_over(start, tmp_path):
    settings = {**WAITS, "spoil": ("newest", 10)}
    go_back(start, tmp_path, 3, {1: ("before", 11, "kill")}, settings, 4)


@exhaustive
@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"every": 0}, "there is no BackupAndRestore"),
        ({"every": 1000}, "no complete snapshot exists"),
        ({"every": 4, "spoil": ("all", 10)}, "damaged"),
        *(({"every": 4, "data": data}, why) for data, why in ONCE.items()),
    ],
)
def test_without_a_snapshot_it_ends_with_the_reason(start, tmp_path, settings, why):
    settings = {"folder": str(tmp_path), **WAITS, **settings}
    faults = {1: ("before", 11, "kill")}
    answers = start(3).answers(f"{BEHAVIOURS}:trained", settings, faults, silent={1})
    for rank in (0, 2):
        done, said = answers[rank]
        assert not done
        assert "GroupLostError" in said
        assert why in said


@exhaustive
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_each_host_has_files_of_its_own(start, tmp_path, victim):
    """Without the lost folder nobody knows that all have written the last snapshot."""
    settings = {**WAITS, "folder": str(tmp_path / "of-{}")}
    faults = {victim: ("before", 10, "kill")}
    ranks = start(3, hosts=3)
    answers = ranks.answers(
        f"{BEHAVIOURS}:trained",
        {"every": 4, **settings},
        faults,
        silent={victim},
    )
    survivors = [rank for rank in range(3) if rank != victim]
    check(answers, survivors, {"every": 4, **settings}, 4)


@exhaustive
@pytest.mark.parametrize("faults", [{}, {1: ("before", 10, "kill")}])
def test_another_worker_comes_in_the_same_moment(start, tmp_path, faults):
    settings = {**WAITS, "folder": str(tmp_path / "here"), "every": 4}
    arguments = [0, 1], 8, faults, str(tmp_path / "come"), settings
    ranks = start(3, strategy=False)
    answers = ranks.answers(f"{BEHAVIOURS}:coming", *arguments, silent=set(faults))
    survivors = [rank for rank in range(3) if rank not in faults]
    results = check(answers, survivors, settings, 8)
    assert results[0]["begun"] == 2


@exhaustive
@pytest.mark.parametrize(
    ("elastic", "faults"),
    [
        ({}, {1: ("before", 10, "kill")}),
        ({}, {0: ("backward", 10, "kill")}),
        ({"copies": 1}, {0: ("before", 10, "kill"), 1: ("before", 10, "kill")}),
    ],
)
def test_shards_are_lost(start, tmp_path, elastic, faults):
    settings = {"losing": 0, "sharded": True, "elastic": elastic, "asynchronous": False}
    for result in go_back(start, tmp_path, 4, faults, settings, 8):
        assert result["begun"] == 2
