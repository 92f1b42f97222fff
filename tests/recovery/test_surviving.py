"""Workers are lost and others come; what is trained is what one undisturbed process trains."""

import json

import numpy as np
import pytest

from tests.harness.references import reference
from tests.harness.tiers import exhaustive, some
from tests.recovery.behaviours.data_kinds import DATA, VALIDATION
from tests.strategy.comparison import assert_close, assert_equal
from tfdist.compression import Int8, OneBit, Policy

SURVIVING = "tests.recovery.behaviours.surviving"
PHASES = ["before", "forward", "backward", "after", "evaluation", "epoch end"]


ALIKE = ("weights", "history", "epochs")


def check(answers, survivors, settings=None, tolerance=1e-5, alike=ALIKE):
    """All that are left have what one process has, and the same bits."""
    # What only looks on needs no reference of its own.
    aside = ("watched", "sharded", "elastic")
    settings = {k: v for k, v in (settings or {}).items() if k not in aside}
    expected = reference(f"{SURVIVING}:trained", settings, {})
    results = {}
    for rank in survivors:
        done, result = answers[rank]
        assert done, result
        results[rank] = result
    first = results[survivors[0]]
    for rank, result in results.items():
        for what in alike:
            assert_close(result[what], expected[what], f"rank {rank}: {what}", tolerance)
        assert_equal(result["weights"], first["weights"], f"rank {rank}")
        assert_equal(result["slots"], first["slots"], f"rank {rank}")
    return results, expected


def lose(start, workers, faults, settings=None, tolerance=1e-5, alike=ALIKE, **group):
    ranks = start(workers, **group)
    dead = set(faults)
    answers = ranks.answers(f"{SURVIVING}:trained", settings or {}, faults, silent=dead)
    survivors = [rank for rank in range(workers) if rank not in dead]
    results, expected = check(answers, survivors, settings, tolerance, alike)
    for result in results.values():
        # Each once. With data of unknown length, Keras begins a batch that is not there.
        events = [event for event in result["events"] if event != ("batch", 7)]
        assert events == expected["events"]
    return results


@exhaustive
def test_a_worker_is_killed_in_the_middle_of_a_step(start):
    for result in lose(start, 3, {2: ("backward", 9, "kill")}).values():
        assert result["changes"] == [(3, 2)]


@exhaustive
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("workers", "victim"), [(2, 0), (2, 1), (3, 0), (4, 2)])
def test_whoever_is_killed_whenever(start, workers, victim, phase):
    for result in lose(start, workers, {victim: (phase, 10, "kill")}).values():
        assert result["changes"] == [(workers, workers - 1)]


@exhaustive
@pytest.mark.parametrize("transport", ["p2p", "nccl", "host"])
@pytest.mark.parametrize("phase", ["before", "backward", "after"])
def test_losses_with_gpus_are_survived(start, phase, transport):
    lose(start, 3, {1: (phase, 10, "kill")}, gpus=transport)


@exhaustive
@pytest.mark.parametrize("phase", ["before", "backward"])
@pytest.mark.parametrize("step", [0, 1, 6, 7, 8, 20])
def test_at_any_step(start, phase, step):
    lose(start, 3, {1: (phase, step, "kill")})


@exhaustive
@pytest.mark.parametrize(
    "settings",
    [
        {"steps_per_execution": 3},
        {"steps_per_epoch": 5},
        {"steps_per_epoch": 5, "steps_per_execution": 2},
        {"optimizer": {"clipnorm": 0.1}},
        {"optimizer": {"use_ema": True}},
        {"optimizer": {"weight_decay": 0.01}},
        {"optimizer": {"gradient_accumulation_steps": 3}},
        {"optimizer": {"gradient_accumulation_steps": 3, "global_clipnorm": 0.1}},
    ],
)
def test_ways_to_train(start, settings):
    lose(start, 3, {1: ("backward", 10, "kill")}, settings)


@exhaustive
@pytest.mark.parametrize("step", [7, 10])
@pytest.mark.parametrize("data", [kind for kind in DATA if kind != "dataset"])
def test_kinds_of_data(start, data, step):
    lose(start, 3, {1: ("backward", step, "kill")}, {"data": data})


@exhaustive
@pytest.mark.parametrize("data", [kind for kind in DATA if kind != "dataset"])
def test_a_worker_comes_to_kinds_of_data(start, tmp_path, data):
    ranks = start(3, strategy=False)
    arguments = [0, 1], 10, {}, str(tmp_path / "come"), {"data": data}
    answers = ranks.answers(f"{SURVIVING}:coming", *arguments)
    results, _ = check(answers, [0, 1, 2], {"data": data})
    assert results[0]["changes"] == [(2, 3)]


@exhaustive
@pytest.mark.parametrize("accumulation", [None, 3])
def test_a_loss_in_mixed_precision_is_survived(start, accumulation):
    settings = {"policy": "mixed_float16"}
    if accumulation:
        settings["optimizer"] = {"gradient_accumulation_steps": accumulation}
    lose(start, 3, {1: ("backward", 10, "kill")}, settings, tolerance=2e-3)


@exhaustive
@pytest.mark.parametrize("hosts", [[0, 0, 1], [0, 1, 1], 3])
def test_a_loss_on_several_hosts_is_survived(start, hosts):
    lose(start, 3, {2: ("backward", 10, "kill")}, hosts=hosts)


@exhaustive
@pytest.mark.parametrize("victim", [0, 2])
def test_a_stopped_worker_is_given_up_and_learns_of_it(start, monkeypatch, victim):
    monkeypatch.setenv("TFDIST_HEARTBEAT_TIMEOUT", "15")
    ranks = start(3)
    faults = {victim: ("before", 10, "stop")}
    answers = ranks.answers(f"{SURVIVING}:trained", {}, faults, silent={victim})
    check(answers, [rank for rank in range(3) if rank != victim])
    done, message = ranks.wake(victim)
    assert not done
    assert "GroupLostError" in message


@exhaustive
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("phase", ["backward", "epoch end"])
def test_callbacks_that_communicate(start, tmp_path, victim, phase):
    trace = tmp_path / "trace.json"
    settings, alike = {"watched": str(trace)}, ["weights", "epochs"]
    lose(start, 3, {victim: (phase, 10, "kill")}, settings, alike=alike)
    assert workers_of(trace) == {0, 1}


@exhaustive
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("phase", ["before", "backward", "evaluation"])
def test_callbacks_that_write_files(start, tmp_path, victim, phase):
    faults = {victim: (phase, 9, "kill")}
    ranks = start(3)
    settings = {"files": str(tmp_path)}
    answers = ranks.answers(f"{SURVIVING}:trained", settings, faults, silent=set(faults))
    check(answers, [rank for rank in range(3) if rank not in faults], alike=["epochs"])
    assert (tmp_path / "model.keras").exists()
    epochs = [line.split(",")[0] for line in (tmp_path / "log.csv").read_text().splitlines()]
    assert epochs[-2:] == ["1", "2"]


@exhaustive
@pytest.mark.parametrize(
    "faults",
    [
        {1: ("backward", 9, "kill"), 2: ("backward", 9, "kill")},
        {0: ("before", 9, "kill"), 2: ("before", 12, "kill")},
        {3: ("before", 9, "kill"), 0: ("change", 9, "kill")},
    ],
)
def test_two_of_four(start, faults):
    lose(start, 4, faults)


@exhaustive
@pytest.mark.parametrize(
    ("phase", "step", "saved"),
    [("backward", 9, 9), ("after", 8, 8), ("before", 7, 7), ("epoch end", 7, None)],
)
def test_what_too_few_have_is_saved_before_they_wait_and_give_up(
    start, tmp_path, phase, step, saved
):
    settings = {"snapshots": str(tmp_path / "snapshots"), "elastic": {"min_workers": 2}}
    few = {**settings, "patience": 10.0}
    [(done, said), _] = start(2).answers(
        f"{SURVIVING}:trained", few, {1: (phase, step, "kill")}, silent={1}
    )
    assert not done
    assert "GroupLostError" in said
    assert "1 of at least 2 workers remain" in said
    # Not in the middle of an epoch's end, which some callbacks have seen.
    if saved is not None:
        [snapshot] = (tmp_path / "snapshots").iterdir()
        assert snapshot.name.startswith(f"step-{saved:010d}-")
    check(start(2).answers(f"{SURVIVING}:trained", settings, {}), [0, 1])


@exhaustive
def test_what_too_few_have_is_saved_before_another_one_comes(start, tmp_path):
    ranks = start(3, strategy=False)
    settings = {
        "snapshots": str(tmp_path / "snapshots"),
        "elastic": {"min_workers": 2, "max_workers": 2},
    }
    faults = {1: ("backward", 8, "kill")}
    arguments = [0, 1], 5, faults, str(tmp_path / "come"), settings
    answers = ranks.answers(f"{SURVIVING}:coming", *arguments, silent={1})
    results, expected = check(answers, [0, 2])
    assert results[0]["changes"][:2] == [(2, 1), (1, 2)]
    assert results[0]["events"] == expected["events"]


@pytest.mark.parametrize("transport", some([None, "p2p", "nccl"], always=[None]))
def test_a_worker_is_lost_and_another_one_comes(start, tmp_path, transport):
    ranks = start(4, strategy=False, gpus=transport)
    arguments = [0, 1, 2], 12, {1: ("backward", 8, "kill")}, str(tmp_path / "come")
    answers = ranks.answers(f"{SURVIVING}:coming", *arguments, silent={1})
    results, expected = check(answers, [0, 2, 3])
    for rank in (0, 2):
        assert results[rank]["changes"] == [(3, 2), (2, 3)]
        assert results[rank]["events"] == expected["events"]
    assert results[3]["changes"] == [(1, 3)]
    seen = results[3]["events"][2:]
    assert seen == expected["events"][-len(seen) :]


@exhaustive
@pytest.mark.parametrize("kind", VALIDATION)
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    ("phase", "step"),
    [("evaluation", 7), ("evaluation", 14), ("epoch end", 7), ("backward", 10)],
)
def test_validation_reads_the_same_rows(start, kind, victim, phase, step):
    faults = {victim: (phase, step, "kill")}
    answers = start(3).answers(
        f"{SURVIVING}:trained", {"validation": kind}, faults, silent={victim}
    )
    survivors = [rank for rank in range(3) if rank != victim]
    results, expected = check(answers, survivors, {"validation": kind})
    for result in results.values():
        assert result["events"] == expected["events"]


@exhaustive
@pytest.mark.parametrize("kind", VALIDATION)
@pytest.mark.parametrize(
    ("step", "faults"),
    [(4, {}), (10, {}), (8, {1: ("evaluation", 14, "kill")}), (4, {0: ("evaluation", 7, "kill")})],
)
def test_validation_reads_the_same_rows_on_one_that_comes(start, tmp_path, kind, step, faults):
    ranks = start(4, strategy=False)
    arguments = [0, 1, 2], step, faults, str(tmp_path / "come"), {"validation": kind}
    answers = ranks.answers(f"{SURVIVING}:coming", *arguments, silent=set(faults))
    there = [rank for rank in range(4) if rank not in faults]
    results, expected = check(answers, there, {"validation": kind})
    for rank in there[:-1]:
        assert results[rank]["events"] == expected["events"]


@exhaustive
@pytest.mark.parametrize(
    ("step", "faults"),
    [
        (4, {}),  # in the first epoch, whose order is not shuffled yet
        (10, {}),
        (7, {1: ("epoch end", 7, "kill")}),
    ],
)
def test_one_that_comes_with_other_data_leaves_alone(start, tmp_path, monkeypatch, step, faults):
    monkeypatch.setenv("TFDIST_STALL_WARNING", "3")
    ranks, settings = start(3, strategy=False), {"data": "shuffling PyDataset"}
    arguments = [0, 1], step, faults, str(tmp_path / "come"), {**settings, "seed": 5}
    answers = ranks.answers(f"{SURVIVING}:coming", *arguments, silent={*faults})
    there = [rank for rank in range(2) if rank not in faults]
    results, expected = check(answers, there, settings)
    done, message = answers[2]
    assert not done
    assert "ProgramMismatchError: The workers read different data: worker 0" in message
    assert "has y of" in message
    for result in results.values():
        assert result["changes"][-1][1] == len(there)
        assert result["events"] == expected["events"]


SHUFFLED = ["dataset", "shuffled arrays"]


@exhaustive
@pytest.mark.parametrize("data", SHUFFLED)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("phase", "at", "comes"),
    [("train begin", 0, 3), ("epoch begin", 0, 3), ("before", 0, 3), ("epoch begin", 7, 10)],
)
def test_a_loss_before_a_step_of_an_epoch_and_one_that_comes_in_it(
    start, tmp_path, data, phase, at, comes, victim
):
    ranks = start(4, strategy=False)
    faults = {victim: (phase, at, "kill")}
    arguments = [0, 1, 2], comes, faults, str(tmp_path / "come"), {"data": data}
    answers = ranks.answers(f"{SURVIVING}:coming", *arguments, silent={victim})
    results, _ = check(answers, [rank for rank in range(4) if rank != victim], {"data": data})
    assert results[2]["changes"] == [(3, 2), (2, 3)]


@exhaustive
@pytest.mark.parametrize("data", [*SHUFFLED, "shuffling PyDataset"])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("phase", ["epoch begin", "before", "backward"])
def test_one_is_lost_in_the_first_step_of_an_epoch_and_another_one_waits(
    start, tmp_path, data, phase, victim
):
    ranks = start(4, strategy=False)
    faults = {victim: (phase, 7, "kill")}
    arguments = [0, 1, 2], 7, faults, str(tmp_path / "come"), {"data": data}
    answers = ranks.answers(f"{SURVIVING}:coming", *arguments, silent={victim})
    check(answers, [rank for rank in range(4) if rank != victim], {"data": data})


@exhaustive
@pytest.mark.parametrize(
    ("step", "settings"),
    [
        (1, {}),
        (6, {}),
        (7, {}),
        (8, {}),
        (7, {"optimizer": {"gradient_accumulation_steps": 3}}),
    ],
)
def test_a_worker_comes(start, tmp_path, step, settings):
    ranks = start(3, strategy=False)
    arguments = [0, 1], step, {}, str(tmp_path / "come"), settings
    answers = ranks.answers(f"{SURVIVING}:coming", *arguments)
    results, _ = check(answers, [0, 1, 2], settings)
    assert results[0]["changes"] == [(2, 3)]
    assert np.isfinite(results[2]["weights"][0]).all()


@exhaustive
def test_another_worker_comes_while_the_group_changes(start, tmp_path):
    arguments = [0, 1], 10, {}, str(tmp_path / "come"), {"late": 3}
    answers = start(4, strategy=False).answers(f"{SURVIVING}:coming", *arguments)
    results, _ = check(answers, range(4))
    assert results[0]["changes"] == [(2, 3), (3, 4)]


@exhaustive
def test_a_worker_is_lost_in_the_step_that_another_one_has_waited_for(start, tmp_path):
    # The loss is noticed between the step and the change of the group that it has granted.
    settings = {"snapshots": str(tmp_path / "snapshots"), "save_every": 1}
    arguments = [0, 1, 2], 10, {1: ("after", 11, "kill")}, str(tmp_path / "come"), settings
    answers = start(4, strategy=False).answers(f"{SURVIVING}:coming", *arguments, silent={1})
    check(answers, [0, 2, 3])


@exhaustive
@pytest.mark.parametrize("step", [4, 16])
def test_a_worker_that_comes_scales_the_learning_rate_as_the_others(start, tmp_path, step):
    arguments = [0, 1], step, {}, str(tmp_path / "come"), {"scaled": True}
    answers = start(3, strategy=False).answers(f"{SURVIVING}:coming", *arguments)
    assert all(done for done, _ in answers), answers
    for _, result in answers:
        assert_equal(result["weights"], answers[0][1]["weights"], "weights")


@exhaustive
@pytest.mark.parametrize("gpus", [None, "nccl"])
def test_a_worker_comes_where_nothing_is_compressed_any_more(start, tmp_path, gpus):
    """All that are left are on one host, and so is the newcomer."""
    ranks = start(4, strategy=False, hosts=[0, 0, 1, 0], gpus=gpus)
    settings = {"compression": Policy(Int8(), smallest=0)}
    faults = {2: ("backward", 8, "kill")}
    arguments = [0, 1, 2], 12, faults, str(tmp_path / "come"), settings
    answers = ranks.answers(f"{SURVIVING}:coming", *arguments, silent={2})
    for rank in (0, 1, 3):
        done, result = answers[rank]
        assert done, result
        assert_equal(result["weights"], answers[0][1]["weights"], "weights")


@exhaustive
@pytest.mark.parametrize("step", [4, 10])
@pytest.mark.parametrize("codecs", [None, {0: "fp16", 1: "int8"}, {1: None}])
# On the third kind of hosts, two workers sum on their GPUs first from then on.
@pytest.mark.parametrize(("hosts", "gpus"), [(3, None), (3, "nccl"), ([0, 1, 1], "nccl")])
def test_a_worker_comes_to_compressed_gradients(start, tmp_path, step, codecs, hosts, gpus):
    settings = {"compression": Policy(OneBit(), smallest=0), "codecs": codecs}
    arguments = [0, 1], step, {}, str(tmp_path / "come"), settings
    ranks = start(3, strategy=False, hosts=hosts, gpus=gpus)
    answers = ranks.answers(f"{SURVIVING}:coming", *arguments)
    assert all(done for done, _ in answers), answers
    for _, result in answers:
        assert_equal(result["weights"], answers[0][1]["weights"], "weights")


@exhaustive
@pytest.mark.parametrize("step", [4, 7, 14])
def test_a_worker_comes_where_callbacks_communicate(start, tmp_path, step):
    """The newcomer takes part in what the others do every so many steps."""
    trace = tmp_path / "trace.json"
    ranks = start(3, strategy=False)
    settings = {"watched": str(trace)}
    arguments = [0, 1], step, {}, str(tmp_path / "come"), settings
    answers = ranks.answers(f"{SURVIVING}:coming", *arguments)
    check(answers, [0, 1, 2], settings, alike=["weights", "epochs"])
    assert workers_of(trace) == {0, 1, 2}


def workers_of(trace):
    """The workers with steps in a timeline."""
    events = json.loads(trace.read_text())["traceEvents"]
    return {event["pid"] for event in events if event.get("cat") == "step"}
