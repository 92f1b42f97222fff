"""Pipelines that lose workers go on as whole pipelines, with the result of one process."""

from __future__ import annotations

import numpy as np
import pytest

from tests.harness.references import reference
from tests.harness.tiers import exhaustive
from tests.strategy.comparison import assert_close

PIPELINES = "tests.recovery.behaviours.pipelines"
PHASES = [
    "before",
    "forward",
    "backward",
    "prepares",
    "commits",
    "after",
    "evaluation",
    "epoch end",
]
# Of four workers 0 and 1 hold the first stage, 2 and 3 the second. Who leaves if one is lost:
LEAVES = {0: 3, 1: 3, 2: 1, 3: 1}


def check(answers, survivors, settings=None, tolerance=1e-5):
    """All that are left have what one process has; those with the same stages the same bits."""
    expected = reference(f"{PIPELINES}:trained", settings or {}, {})
    results = {}
    for rank in survivors:
        done, results[rank] = answers[rank]
        assert done, results[rank]
    for rank, result in results.items():
        for what in ("weights", "history", "epochs"):
            assert_close(result[what], expected[what], f"rank {rank}: {what}", tolerance)
        assert result["standing"] == results[survivors[0]]["standing"]
    held = {}
    for rank, result in results.items():
        for name, value in result["held"].items():
            assert np.array_equal(held.setdefault(name, value), value), f"{name} of rank {rank}"
    return results, expected


def lose(start, victim, phase, settings=None, step=10):
    faults = {victim: (phase, step, "kill")}
    answers = start(4).answers(f"{PIPELINES}:trained", settings or {}, faults, silent={victim})
    done, said = answers[LEAVES[victim]]
    assert not done
    assert "leaves: too few workers remain for its pipeline" in said
    survivors = [rank for rank in range(4) if rank not in (victim, LEAVES[victim])]
    results, expected = check(answers, survivors, settings)
    for result in results.values():
        assert result["changes"] == [(4, 2)]
        assert result["events"] == expected["events"]
    return results


EVERYWHERE = [(number % 4, phase) for number, phase in enumerate(PHASES)]
EVERYWHERE += [(victim, phase) for victim in range(4) for phase in ("backward", "commits")]


@exhaustive
@pytest.mark.parametrize(("victim", "phase"), dict.fromkeys(EVERYWHERE))
def test_the_other_pipeline_goes_on(start, victim, phase):
    lose(start, victim, phase)


@exhaustive
@pytest.mark.parametrize("step", [0, 1, 6, 7, 19])
def test_at_any_step(start, step):
    lose(start, 1, "backward", step=step)


@exhaustive
@pytest.mark.parametrize(
    "settings",
    [
        {"tied": True},
        {"tied": True, "optimizer": {"global_clipnorm": 0.1}},
        {"schedule": "zb_h1"},
        {"steps_per_execution": 3},
        {"optimizer": {"gradient_accumulation_steps": 3}},
        {"optimizer": {"use_ema": True}},
    ],
    ids=str,
)
def test_ways_to_train(start, settings):
    lose(start, 3, "backward", settings)


@exhaustive
@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("settings", [{}, {"tied": True}], ids=str)
def test_a_step_that_stands_elsewhere_is_redone(start, late, settings):
    """Nobody who is left holds the other's stages."""
    results = lose(start, 3, "after", {**settings, "late": {late: 10}}, step=11)
    assert {rank: result["redone"] for rank, result in results.items()} == {late: 1, 2 - late: 0}


@exhaustive
@pytest.mark.parametrize("lost", [(0, 3), (2, 1)])
def test_parts_of_two_pipelines_become_one(start, lost):
    faults = dict.fromkeys(lost, ("before", 10, "kill"))
    answers = start(4).answers(f"{PIPELINES}:trained", {}, faults, silent=set(lost))
    results, expected = check(answers, [rank for rank in range(4) if rank not in lost])
    for result in results.values():
        assert result["changes"] == [(4, 2)]
        assert result["events"] == expected["events"]


@exhaustive
@pytest.mark.parametrize("settings", [{}, {"tied": True}, {"schedule": "zb_h1"}], ids=str)
def test_two_workers_come_and_are_a_pipeline_again(start, tmp_path, settings):
    sign = str(tmp_path / "come")
    arguments = [0, 1, 2, 3], {4: 1, 5: 3}, 14, {3: ("backward", 8, "kill")}, sign, settings
    answers = start(6, strategy=False).answers(f"{PIPELINES}:coming", *arguments, silent={3})
    results, expected = check(answers, [0, 2, 4, 5], settings)
    for rank in (0, 2):
        assert results[rank]["changes"] == [(4, 2), (2, 4)]
        assert results[rank]["events"] == expected["events"]
    for rank in (4, 5):
        assert results[rank]["changes"] == [(1, 4)]


@exhaustive
@pytest.mark.parametrize("phase", ["change", "after"])
def test_one_that_has_come_is_lost_again(start, tmp_path, phase):
    sign, settings = str(tmp_path / "come"), {"dying": {5: (phase, 0, "kill")}}
    arguments = [0, 1, 2, 3], {4: 1, 5: 3}, 14, {3: ("backward", 8, "kill")}, sign, settings
    answers = start(6, strategy=False).answers(f"{PIPELINES}:coming", *arguments, silent={3, 5})
    results, expected = check(answers, [0, 2])
    for result in results.values():
        assert result["changes"] == [(4, 2), (2, 4), (4, 2)]
        assert result["events"] == expected["events"]
    done, said = answers[4]
    assert not done and "leaves: too few workers remain" in said


@exhaustive
@pytest.mark.parametrize("victim", [0, 3])
def test_a_stopped_worker_is_given_up_and_learns_of_it(start, monkeypatch, victim):
    monkeypatch.setenv("TFDIST_HEARTBEAT_TIMEOUT", "15")
    ranks = start(4)
    faults = {victim: ("before", 10, "stop")}
    answers = ranks.answers(f"{PIPELINES}:trained", {}, faults, silent={victim})
    check(answers, [rank for rank in range(4) if rank not in (victim, LEAVES[victim])])
    done, said = ranks.wake(victim)
    assert not done and "GroupLostError" in said


@exhaustive
@pytest.mark.parametrize("victim", [0, 1])
def test_a_pipeline_goes_back_to_the_snapshot_with_another_worker(start, tmp_path, victim):
    settings = {"saved": str(tmp_path / "snapshots")}
    faults = {victim: ("backward", 8, "kill")}
    arguments = [0, 1], {2: victim}, 5, faults, str(tmp_path / "come"), settings
    answers = start(3, strategy=False).answers(f"{PIPELINES}:coming", *arguments, silent={victim})
    # What is trained again counts twice.
    results, _ = check(answers, [1 - victim, 2])
    assert results[1 - victim]["standing"] == 23


@exhaustive
@pytest.mark.parametrize("saved", [False, True])
def test_a_stage_that_is_lost_for_good_ends_the_job(start, tmp_path, saved):
    settings = {"patience": 5.0, **({"saved": str(tmp_path / "snapshots")} if saved else {})}
    faults = {1: ("backward", 8, "kill")}
    [(done, said), _] = start(2).answers(f"{PIPELINES}:trained", settings, faults, silent={1})
    assert not done
    assert "Training cannot continue: only lost workers held stage 1 of the model" in said


@exhaustive
def test_what_cannot_follow_is_refused(start):
    [first, *_] = start(2).run(f"{PIPELINES}:refused")
    assert "Pass `cuts` or" in first["cut by time"]
    assert "compress the gradients of a model in stages" in first["compression"]
