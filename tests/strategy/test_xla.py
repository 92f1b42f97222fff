"""Steps that XLA compiles between their collectives give the result of one process without XLA."""

import itertools
import os
from unittest import mock

import numpy as np
import pytest

from tests.harness import gpus
from tests.harness.groups import GROUPS, OTHER_GROUPS
from tests.harness.ranks import Ranks
from tests.harness.references import reference
from tests.harness.tiers import exhaustive, some, spread
from tests.strategy.comparison import (
    PACKAGE,
    assert_close,
    assert_equal,
    behaviours,
    check_same_as_alone,
)

MODULES = (
    "models",
    "losses",
    "noise",
    "inputs",
    "optimizers",
    "execution",
    "other_optimizers",
    "global_batch",
    "adapters",
    "every_loss",
    "every_metric",
)
# What several replicas refuse, or say of themselves, has tests of its own.
NOT_COMPARED = {
    "adapters:lora_outside",
    "every_loss:unreduced_circle",
    "every_metric:what_is_no_sum",
    "global_batch:in_a_loop_by_hand",
    "global_batch:means_by_hand",
    "noise:mixed_after_a_layer",
    "noise:shuffles",
    "noise:without_seeds",
    "other_optimizers:applied_outside",
    "other_optimizers:float8_refusal",
    "other_optimizers:shards_that_nobody_sums",
}
ALL = [b for module in MODULES for b in behaviours(module) if b not in NOT_COMPARED]
# Branches that communicate, sparse gradients, a loop around steps; the first three by default.
USUAL = [
    "optimizers:gradient_accumulation",
    "models:embedding_with_sparse_gradients",
    "execution:several_steps_per_execution",
    "models:masked_loss_over_time",
    "optimizers:overflow_on_one_worker",
]
ON_GROUPS = [
    *USUAL,
    "models:synchronized_batch_normalization",
    "optimizers:global_clipnorm",
    "optimizers:mixed_float16",
    "noise:batches_of_a_fixed_size",
]
GPUS = ["2 GPUs by own kernels", "2 GPUs by NCCL", "2 GPUs through the host", "2x2 GPUs"]
SHARDED = [
    "optimizers:clipnorm",
    "optimizers:gradient_accumulation",
    "optimizers:overflow_on_one_worker",
    "models:embedding_with_sparse_gradients",
]
OPTIMIZERS = ["Adam", "AdamW", "Adafactor", "Nadam", "Lion", "Lamb", "Ftrl", "RMSprop", "Adamax"]


def skip_without_compiler(group):
    if "GPU" in group and gpus.have_devices():
        pytest.skip("XLA has no compiler for this device: pip install tensorflow")


def check(group, behaviour, *args):
    """Compares a behaviour on a group, with XLA, with the same in one process without."""
    skip_without_compiler(group)
    alone = reference(f"{PACKAGE}.{behaviour}", *args)
    results = GROUPS[group].run(f"{PACKAGE}.xla:as_elsewhere", f"{PACKAGE}.{behaviour}", *args)
    for rank, result in enumerate(results):
        assert_close(result, alone, f"rank {rank}")
        assert_equal(result.get("weights"), results[0].get("weights"), f"rank {rank}")


@pytest.mark.parametrize("behaviour", some(ALL, always=USUAL[:1], oldest=["models:sequential"]))
def test_two_workers_give_the_result_of_one_process(behaviour):
    check("2", behaviour)


@pytest.mark.parametrize(
    ("behaviour", "group"),
    some(
        itertools.product(ON_GROUPS, [*OTHER_GROUPS, "2 hosts"]),
        always=[],
        covering=spread(ON_GROUPS, [*OTHER_GROUPS, "2 hosts"], 2),
    ),
)
def test_other_groups_give_the_result_of_one_process(group, behaviour):
    check(group, behaviour)


@exhaustive
@pytest.mark.parametrize("group", GPUS)
@pytest.mark.parametrize("behaviour", ON_GROUPS)
def test_groups_with_gpus_give_the_result_of_one_process(group, behaviour):
    check(group, behaviour)


@exhaustive
@pytest.mark.parametrize("accumulation", [None, 2])
@pytest.mark.parametrize("group", ["1x2", "2x2"])
def test_the_copies_on_all_devices_are_equal(group, accumulation):
    for variables in GROUPS[group].run(f"{PACKAGE}.xla:copies", accumulation):
        for held in variables:
            assert len(held) == 2 and np.array_equal(*held)


@exhaustive
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_a_size_that_is_new_to_one_worker(policy):
    results = GROUPS["2"].run(f"{PACKAGE}.xla:with_sizes_known_to_one_worker", policy)
    assert_equal(results[0]["weights"], results[1]["weights"], "the workers")


@exhaustive
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_gives_the_result_of_one_process(name):
    check("2", "optimizers:by_name", name)


@pytest.mark.parametrize("behaviour", some(SHARDED, always=[]))
def test_sharded_optimizers_give_the_result_of_one_process(behaviour):
    check("2", "sharded:as_elsewhere", behaviour)


@exhaustive
@pytest.mark.parametrize("group", GPUS[:3])
@pytest.mark.parametrize("behaviour", SHARDED)
def test_sharded_optimizers_on_gpus(group, behaviour):
    check(group, "sharded:as_elsewhere", behaviour)


@exhaustive
@pytest.mark.parametrize("name", ["int8", "topk", "powersgd"])
@pytest.mark.parametrize("group", ["2", "3 on 2 hosts", "2 GPUs by NCCL"])
def test_compressed_gradients_train_close_to_exact_ones(group, name):
    skip_without_compiler(group)
    exact = GROUPS["2"].run(f"{PACKAGE}.compressed:exact")[0]["history"]["loss"]
    behaviour = f"{PACKAGE}.compressed:every_codec"
    results = GROUPS[group].run(f"{PACKAGE}.xla:as_elsewhere", behaviour, name)
    for rank, result in enumerate(results):
        assert_equal(result["weights"], results[0]["weights"], f"rank {rank}")
    assert results[0]["history"]["loss"][-1] == pytest.approx(exact[-1], rel=0.02)


@exhaustive
def test_evaluations_and_predictions():
    expected = reference(f"{PACKAGE}.xla:evaluated_and_predicted")
    for rank, result in enumerate(GROUPS["2"].run(f"{PACKAGE}.xla:evaluated_and_predicted")):
        assert_close(result, expected, f"rank {rank}")


@pytest.mark.parametrize("jit", some([True, False], always=[]))
def test_sums_begin_while_the_backward_pass_goes_on(jit):
    for counts in GROUPS["2"].run(f"{PACKAGE}.xla:what_sums_wait_for", jit):
        # Those of eight layers: forward, to the layer before, and to the weights.
        assert counts == [8 + 0 + 1, 8 + 4 + 5, 8 + 7 + 8]


@pytest.fixture
def pair():
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@exhaustive
def test_a_worker_is_killed(pair):
    fault = f"{PACKAGE}.faults:fit_until"
    answers = pair.answers(f"{PACKAGE}.xla:as_elsewhere", fault, "killed", silent={1})
    assert "worker 1" in answers[0][1] and "is lost: " in answers[0][1]


@exhaustive
def test_a_worker_is_stopped(pair):
    fault = f"{PACKAGE}.faults:fit_until"
    with mock.patch.dict(os.environ, TFDIST_HEARTBEAT_TIMEOUT="3"):
        answers = pair.answers(f"{PACKAGE}.xla:as_elsewhere", fault, "stopped", silent={1})
    assert "worker 1" in answers[0][1] and "is lost: " in answers[0][1]


@exhaustive
def test_workers_take_different_steps(pair):
    fault = f"{PACKAGE}.faults:different_steps"
    for said in pair.run(f"{PACKAGE}.xla:as_elsewhere", fault):
        assert "do not call the same collectives in the same order: worker 0" in said
        assert "all_reduce 'gradients'" in said


@exhaustive
@pytest.mark.parametrize("behaviour", ["in_a_graph", "several_steps_at_once"])
def test_a_layer_fails_on_one_worker(pair, behaviour):
    failing = f"{PACKAGE}.failing_steps:{behaviour}"
    (_, (here, _)), (_, (there, _)) = pair.answers(f"{PACKAGE}.xla:as_elsewhere", failing)
    assert "this layer is worn out" in there
    assert "this layer is worn out" in here and "worker 1 (127.0.0.1:" in here


def test_all_workers_compile_or_none():
    for said in GROUPS["2"].run(f"{PACKAGE}.xla:compiled_on_one"):
        assert "jit_compile" in said


@exhaustive
def test_unlike_gpus_are_refused():
    for said in GROUPS["2"].run(f"{PACKAGE}.xla:compiled_for_unlike_gpus"):
        assert "GPU of rank 0; jit_compile=False works on any" in said and "GPU of rank 1" in said


@exhaustive
@pytest.mark.parametrize("group", ["2", "2 by TensorFlow", "1x2"])
def test_what_is_compiled_as_a_whole_must_not_communicate(group):
    for said, losses in GROUPS[group].run(f"{PACKAGE}.xla:compiled_as_a_whole"):
        for text in said:
            assert "UnsupportedError: XLA cannot compile a collective (" in text
            assert "xla.py:" in text.partition("a collective (")[2].partition(")")[0]
            assert "Detected unsupported operations" not in text
        assert losses[1] < losses[0] < 2  # The loss alone may be compiled.


@exhaustive
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("group", ["2", "1x2"])
def test_a_layer_that_compiles_itself(group, jit_compile):
    check_same_as_alone(group, "xla:a_layer_that_compiles_itself", jit_compile)


@exhaustive
@pytest.mark.parametrize("group", ["2", "2 GPUs by own kernels"])
def test_xla_can_be_switched_off_and_names_the_layer_that_it_cannot_compile(group):
    skip_without_compiler(group)
    for off, on in GROUPS[group].run(f"{PACKAGE}.xla:switched_off"):
        assert off.startswith("no error")
        assert "Eig" in on and "own" in on


@exhaustive
def test_one_replica_gives_the_result_of_one_process():
    result = GROUPS["1"].run(f"{PACKAGE}.xla:compiled_by_xla")[0]
    assert_close(result, reference(f"{PACKAGE}.xla:compiled_by_xla"), "one replica")


@exhaustive
def test_auto_does_what_it_does_in_one_process():
    for rank, (on_cpus, on_gpus) in enumerate(GROUPS["2"].run(f"{PACKAGE}.xla:chosen")):
        assert on_cpus == (False, False, "", "")
        *compiled, before, said = on_gpus
        assert compiled == [True, False]
        assert before == ""
        assert said.count("XLA compiles the steps of") == (rank == 0)
