"""Workers that read files of their own share them out anew when the group has changed."""

from __future__ import annotations

import pytest

from tests.harness.tiers import exhaustive
from tests.recovery.behaviours.own_files import FILES, ROWS, write
from tests.strategy.comparison import assert_equal

FILES_OF_THEIR_OWN = "tests.recovery.behaviours.own_files"
ONCE = ["1" * ROWS] * FILES


def results_of(answers, ranks):
    results = []
    for rank in ranks:
        done, result = answers[rank]
        assert done, result
        results.append(result)
    for result in results:
        assert_equal(result["weights"], results[0]["weights"], "weights")
    return results


def at_most_once(seen):
    return all(set(digits) <= {"0", "1"} for digits in seen)


@pytest.fixture
def folder(tmp_path):
    write(tmp_path)
    return str(tmp_path)


@exhaustive
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("batch", ["global", "per_worker"])
@pytest.mark.parametrize("step", [4, 6])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_is_lost(start, folder, victim, step, batch, devices):
    """Of the second epoch, which has four steps with three workers."""
    settings = {"folder": folder, "elastic": {"batch": batch}}
    faults = {victim: ("before", step, "kill")}
    ranks = start(3, devices=devices)
    answers = ranks.answers(f"{FILES_OF_THEIR_OWN}:trained", settings, faults, silent={victim})
    results = results_of(answers, [rank for rank in range(3) if rank != victim])
    for result in results:
        assert result["changes"] == [(3, 2)]
        first, second, *others = result["seen"]
        assert first == ONCE
        assert others == [ONCE] * 2
        # What is missing is the rest of the lost one's files, and one batch of the others.
        assert at_most_once(second)
        missing = "".join(second).count("0")
        assert missing <= 2 * ROWS + 8 if step > 4 else second == ONCE
        assert len(result["steps"]) == (15 if step > 4 else 16)
    assert "the next epoch is divided among all workers again" in results[0]["said"]


@exhaustive
@pytest.mark.parametrize("devices", [1, 2])
def test_a_worker_comes(start, folder, tmp_path, devices):
    ranks = start(3, strategy=False, devices=devices)
    arguments = [0, 1], 6, {}, str(tmp_path / "come"), {"folder": folder}
    answers = ranks.answers(f"{FILES_OF_THEIR_OWN}:coming", *arguments)
    results = results_of(answers, range(3))
    assert "new workers read nothing before the next epoch" in results[0]["said"]
    for result in results[:2]:
        assert result["changes"] == [(2, 3)]
        assert result["seen"] == [ONCE] * 4
    assert results[2]["seen"][-2:] == [ONCE] * 2


@exhaustive
def test_each_reads_all(start, folder):
    """All files, in batches of a third of the rows: twelve steps an epoch."""
    settings = {"folder": folder, "policy": "OFF"}
    faults = {1: ("before", 14, "kill")}
    answers = start(3).answers(f"{FILES_OF_THEIR_OWN}:trained", settings, faults, silent={1})
    for result in results_of(answers, [0, 2]):
        first, _, *others = result["seen"]
        assert first == ["3" * ROWS] * FILES
        assert others == [["2" * ROWS] * FILES] * 2


@exhaustive
def test_steps_of_an_epoch(start, folder):
    """Epochs of a given number of steps begin with the data's beginning after a change."""
    settings = {"folder": folder, "steps_per_epoch": 4}
    faults = {1: ("before", 6, "kill")}
    answers = start(3).answers(f"{FILES_OF_THEIR_OWN}:trained", settings, faults, silent={1})
    for result in results_of(answers, [0, 2]):
        assert result["seen"][0] == ONCE
        assert result["seen"][2:] == [ONCE] * 2
