"""Workers that hold shards of the optimizer's state are lost, and others come."""

import pytest

from tests.harness.groups import GROUPS
from tests.harness.tiers import exhaustive
from tests.recovery.test_surviving import PHASES, check, lose
from tests.strategy.comparison import assert_equal
from tfdist._src.sharding import NAMES

SURVIVING = "tests.recovery.behaviours.surviving"
SHARDED = "tests.recovery.behaviours.sharded"
ALONE = {"sharded": True}
COPIES = {"sharded": True, "elastic": {"copies": 1}}
ALIKE = ("weights", "history", "epochs", "slots")

pytestmark = exhaustive


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("workers", "victim"), [(2, 1), (3, 0)])
def test_whoever_is_killed_whenever(start, workers, victim, phase):
    faults = {victim: (phase, 10, "kill")}
    for result in lose(start, workers, faults, COPIES, alike=ALIKE).values():
        assert result["changes"] == [(workers, workers - 1)]


@pytest.mark.parametrize("step", [0, 1, 7, 20])
def test_at_any_step(start, step):
    lose(start, 4, {2: ("backward", step, "kill")}, COPIES, alike=ALIKE)


@pytest.mark.parametrize(
    "settings",
    [
        {"steps_per_execution": 3},
        {"run_eagerly": True},
        {"optimizer": {"clipnorm": 0.1}},
        {"optimizer": {"global_clipnorm": 0.1}},
        {"optimizer": {"use_ema": True}},
        {"optimizer": {"use_ema": True, "ema_overwrite_frequency": 4}},
        {"optimizer": {"weight_decay": 0.01}},
        {"optimizer": {"gradient_accumulation_steps": 3}},
        {"optimizer": {"gradient_accumulation_steps": 3, "global_clipnorm": 0.1}},
    ],
)
def test_ways_to_train(start, settings):
    faults = {1: ("backward", 10, "kill")}
    lose(start, 3, faults, {**COPIES, **settings}, alike=ALIKE)


@pytest.mark.parametrize("accumulation", [None, 3])
def test_a_loss_in_mixed_precision_is_survived(start, accumulation):
    settings = {**COPIES, "policy": "mixed_float16"}
    if accumulation:
        settings["optimizer"] = {"gradient_accumulation_steps": accumulation}
    lose(start, 3, {1: ("backward", 10, "kill")}, settings, tolerance=2e-3)


@pytest.mark.parametrize(("workers", "late"), [(3, [0]), (4, [1, 2])])
@pytest.mark.parametrize(
    ("place", "step", "accumulation"),
    [("update", 10, None), ("commit", 10, None), ("commit", 9, 3), ("commit", 10, 3)],
)
def test_a_step_that_stands_on_some_only(start, place, step, accumulation, workers, late):
    settings = {**COPIES, "optimizer": {"gradient_accumulation_steps": accumulation}}
    dead, arguments = workers - 1, (place, step, late)
    answers = start(workers).answers(f"{SHARDED}:halfway", settings, *arguments, silent={dead})
    results, expected = check(answers, range(dead), settings, alike=ALIKE)
    for rank, result in results.items():
        assert result["redone"] == ([step - 1] if rank in late else [])
        traced = "traced again for the new group: the first one took" in result["said"]
        assert traced == (rank == 0)
        assert result["events"] == expected["events"]


@pytest.mark.parametrize(
    "faults",
    [
        {0: ("backward", 9, "kill"), 2: ("backward", 9, "kill")},
        {3: ("before", 9, "kill"), 0: ("before", 12, "kill")},
        {3: ("before", 9, "kill"), 0: ("change", 9, "kill")},
        {0: ("before", 9, "kill"), 1: ("change", 9, "kill")},
    ],
)
def test_two_of_four(start, faults):
    lose(start, 4, faults, COPIES, alike=ALIKE)


@pytest.mark.parametrize("broadcasts", [0, 5, 1000])
def test_one_is_lost_while_shards_are_taken_over(start, broadcasts):
    faults, dead = {3: ("backward", 9, "kill")}, {1, 3}
    arguments = COPIES, faults, 1, broadcasts
    answers = start(4).answers(f"{SHARDED}:taking", *arguments, silent=dead)
    check(answers, [0, 2], COPIES, alike=ALIKE)


@pytest.mark.parametrize(
    ("settings", "faults"),
    [
        (ALONE, {1: ("backward", 9, "kill")}),
        (COPIES, {1: ("backward", 9, "kill"), 2: ("backward", 9, "kill")}),
    ],
)
def test_shards_may_be_lost(start, settings, faults):
    answers = start(4).answers(f"{SURVIVING}:trained", settings, faults, silent=set(faults))
    for rank, (done, said) in enumerate(answers):
        if rank not in faults:
            assert not done
            assert "GroupLostError: Only lost workers held a part of the sharded" in said
            assert "Elastic(copies=1)" in said


@pytest.mark.parametrize("settings", [ALONE, COPIES])
@pytest.mark.parametrize("step", [6, 7])
def test_a_worker_comes(start, tmp_path, step, settings):
    arguments = [0, 1], step, {}, str(tmp_path / "come"), settings
    answers = start(3, strategy=False).answers(f"{SURVIVING}:coming", *arguments)
    results, _ = check(answers, [0, 1, 2], settings, alike=ALIKE)
    assert results[0]["changes"] == [(2, 3)]


def test_four_then_three_then_four(start, tmp_path):
    faults = {1: ("backward", 6, "kill")}
    arguments = [0, 1, 2, 3], 10, faults, str(tmp_path / "come"), COPIES
    ranks = start(5, strategy=False)
    answers = ranks.answers(f"{SURVIVING}:coming", *arguments, silent={1})
    results, expected = check(answers, [0, 2, 3, 4], COPIES, alike=ALIKE)
    assert results[0]["changes"] == [(4, 3), (3, 4)]
    assert results[0]["events"] == expected["events"]


@pytest.mark.parametrize("victim", [0, 1])
def test_two_then_four_then_three(start, tmp_path, victim):
    faults = {victim: ("backward", 14, "kill")}
    arguments = [0, 1], 4, faults, str(tmp_path / "come"), COPIES
    ranks = start(4, strategy=False)
    answers = ranks.answers(f"{SURVIVING}:coming", *arguments, silent={victim})
    survivors = [rank for rank in range(4) if rank != victim]
    results, _ = check(answers, survivors, COPIES, alike=ALIKE)
    assert results[survivors[0]]["changes"][-1] == (4, 3)


def test_a_worker_comes_and_compresses(start, tmp_path):
    settings = {**ALONE, "compression": "onebit"}
    arguments = [0, 1], 4, {}, str(tmp_path / "come"), settings
    answers = start(3, strategy=False, hosts=3).answers(f"{SURVIVING}:coming", *arguments)
    assert all(done for done, _ in answers), answers
    for _, result in answers:
        assert_equal(result["weights"], answers[0][1]["weights"], "weights")


@pytest.mark.parametrize("workers", [2, 3])
def test_a_snapshot_behind_a_loss_is_resumed(start, tmp_path, workers):
    settings = {**COPIES, "snapshots": str(tmp_path / "snapshots"), "save_every": 2}
    faults = {2: ("backward", 9, "kill")}
    answers = start(3).answers(f"{SHARDED}:stopped", settings, faults, 15, silent={2})
    for _, said in answers[:2]:
        assert said == "This training is to end here."
    answers = start(workers).answers(f"{SURVIVING}:trained", settings, {})
    check(answers, range(workers), alike=("weights", "slots"))


def test_only_elastic_and_only_copies_cost_anything():
    for seen in GROUPS["2"].run(f"{SHARDED}:in_turn"):
        assert seen == [(True, True, True), (False, False, True), (True, False, True)]


def test_what_cannot_be_passed_on_is_refused():
    for swapping, several in GROUPS["2"].run(f"{SHARDED}:refused"):
        assert "Omit SwapEMAWeights" in swapping
        assert "only the shards of the model's own optimizer" in several


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("kind", NAMES)
def test_an_optimizer_that_is_built_again_is_the_same(kind, scales):
    for first, second, values, kept, slots in GROUPS["2"].run(f"{SHARDED}:rebuilt", kind, scales):
        assert second == first
        assert kept == values
        assert values["_iterations"] == 2
        assert not any(slots) or kind in ("Adagrad", "Ftrl")
