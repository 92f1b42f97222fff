"""Optimizers whose state the workers share out: the weights of one process, whole files."""

from __future__ import annotations

import itertools

import pytest

from tests.harness.tiers import exhaustive, some
from tests.strategy.comparison import (
    GROUPS,
    PACKAGE,
    assert_close,
    assert_equal,
    behaviours,
    check_same_as_alone,
)

ELSEWHERE = [
    "optimizers:momentum_and_schedule",
    "optimizers:clipnorm",
    "optimizers:global_clipnorm",
    "optimizers:clipvalue",
    "optimizers:clipped_sparse_gradients",
    "optimizers:moving_average",
    "optimizers:gradient_accumulation",
    "optimizers:gradient_accumulation_with_moving_average",
    "optimizers:weight_decay_and_constraint",
    "optimizers:frozen_layers",
    "optimizers:loss_scaling",
    "optimizers:overflow_on_one_worker",
    "optimizers:changed_learning_rate",
    "execution:several_steps_per_execution",
    "execution:eagerly_with_accumulation_and_clipping",
    "execution:eagerly_with_loss_scaling",
    "execution:custom_loop",
    "execution:assigned_variables",
]
OWN = [
    ("excluded_from_decay", True),
    ("excluded_from_decay", False),
    ("lookups", "Adam"),
    ("lookups_clipped",),
    ("less_than_workers",),
    ("swapped_averages",),
    ("some_without_gradients",),
    ("own_optimizer",),
    ("plain_sgd", False),
    ("plain_sgd", True),
]
ON_GROUPS = [
    ("as_elsewhere", "optimizers:clipnorm"),
    ("as_elsewhere", "optimizers:gradient_accumulation"),
    ("as_elsewhere", "optimizers:overflow_on_one_worker"),
    ("lookups", "Adam"),
    ("less_than_workers",),
    ("swapped_averages",),
]
FILES = [
    "files:save_in_the_old_format",
    "files:save_and_load_whole_model",
    "files:checkpoint_callback",
    "files:backup_and_restore",
]


def run(group, behaviour, *args):
    return GROUPS[group].run(f"{PACKAGE}.sharded:{behaviour}", *args)


OPTIMIZERS = [
    "SGD",
    "RMSprop",
    "Adam",
    "AdamW",
    "Adadelta",
    "Adagrad",
    "Adamax",
    "Nadam",
    "Ftrl",
    "Lion",
]
# The others differ in what is summed, which the strategy without shards goes through.
USUAL = [
    "optimizers:gradient_accumulation_with_moving_average",
]
OLDEST = [
    "optimizers:global_clipnorm",
    "optimizers:gradient_accumulation",
    "optimizers:gradient_accumulation_with_moving_average",
    "optimizers:loss_scaling",
    "execution:several_steps_per_execution",
    "execution:eagerly_with_accumulation_and_clipping",
    "execution:eagerly_with_loss_scaling",
]


@exhaustive
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_gives_the_result_of_one_process(name):
    check_same_as_alone("2", "sharded:by_name", name)


@pytest.mark.parametrize("behaviour", some(ELSEWHERE, always=USUAL, oldest=OLDEST))
def test_two_workers_give_the_result_of_one_process(behaviour):
    assert behaviour in behaviours(behaviour.split(":")[0])
    check_same_as_alone("2", "sharded:as_elsewhere", behaviour)


@exhaustive
@pytest.mark.parametrize("behaviour", OWN, ids=str)
def test_what_shares_meet(behaviour):
    name, *args = behaviour
    check_same_as_alone("2", f"sharded:{name}", *args)


@exhaustive
@pytest.mark.parametrize(
    ("behaviour", "group"),
    list(itertools.product(ON_GROUPS, ["3 on 2 hosts", "3", "1"])),
    ids=str,
)
def test_other_groups_give_the_result_of_one_process(group, behaviour):
    name, *args = behaviour
    check_same_as_alone(group, f"sharded:{name}", *args)


@exhaustive
@pytest.mark.parametrize(
    "group", ["2 GPUs by own kernels", "2 GPUs by NCCL", "2 GPUs through the host"]
)
@pytest.mark.parametrize("behaviour", USUAL)
def test_shards_on_gpus_give_the_result_of_one_process(group, behaviour):
    check_same_as_alone(group, "sharded:as_elsewhere", behaviour)


@exhaustive
@pytest.mark.parametrize("workers", [2, 3])
def test_each_has_its_share(workers):
    for result in run(str(workers), "uneven"):
        assert result["own"] <= 1.1 * result["whole"] / workers
        assert result["same"]


@pytest.mark.parametrize(
    "behaviour",
    some(FILES, always=[]),
)
def test_files_as_elsewhere(behaviour, tmp_path):
    for group in ("alone", "2"):
        (tmp_path / group).mkdir()
    name = f"{PACKAGE}.sharded:as_elsewhere"
    reference = GROUPS["alone"].run(name, behaviour, str(tmp_path / "alone"))[0]
    for rank, result in enumerate(GROUPS["2"].run(name, behaviour, str(tmp_path / "2"))):
        assert_close(result, reference, f"rank {rank}")


@exhaustive
@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("adam", "model.keras"),
        ("accumulated", "model.weights.h5"),
        ("scaled", "model.keras"),
        ("nadam", "model.keras"),
    ],
)
def test_files_hold_it_whole(kind, file, tmp_path):
    folder = str(tmp_path)
    reference = run("2", "train_and_save", folder, kind)
    groups = [("alone", False), ("2", True), ("3", True)]
    if kind != "accumulated":  # Without shares each worker has a sum of its own so far.
        groups.append(("3", False))
    for group, shard in groups:
        results = run(group, "load_and_go_on", folder, file, kind, shard)
        for rank, result in enumerate(results):
            assert_close(result, reference[0], f"{group}, rank {rank}")
            assert_equal(result["weights"], results[0]["weights"], f"{group}, rank {rank}")


@exhaustive
def test_on_top_of_compression():
    whole, shared = (run("2", "compressed", shard) for shard in (False, True))
    for result in shared:
        assert_close(result, whole[0], "compressed")
        assert_equal(result["weights"], shared[0]["weights"], "compressed")


def test_what_cannot_be_shared_out():
    for *others, own, declared, outside in run("2", "refusals"):
        for name, message in zip(("Lamb", "Adafactor"), others, strict=False):
            assert f"Received: {name}, which is not known to" in message
        assert "Received: WholeSign" in own and "`elementwise = True`" in own
        assert declared == "no error"
        assert "`strategy.run`" in outside
        assert all("\n" not in message for message in others)


def test_all_must_ask_for_it():
    for message in run("2", "disagreement"):
        assert "shard_optimizer" in message and "worker 1" in message


def test_collectives_of_tensorflow():
    for message in run("2 by TensorFlow", "refusal"):
        assert message.startswith("shard_optimizer=True needs the native collectives.")


def test_several_devices_of_a_worker_are_refused():
    assert "one device each. Received: 2" in run("1x2", "refusal")[0]
