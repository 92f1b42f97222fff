"""Models of the zoo on real pipelines, against one process."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.harness import gpus
from tests.harness.groups import GROUPS
from tests.harness.references import reference
from tests.harness.tiers import exhaustive, some, spread
from tests.pipeline.zoo import ZOO
from tests.strategy.comparison import assert_close
from tfdist._src.pipeline.schedules import SCHEDULES

# Here a microbatch has statistics of its own, and one process takes the same microbatches.
BY_MICROBATCHES = frozenset({"residual_cnn"})
# Here a layer with a state is called in two stages, which see its changes only after a step.
NOT_THE_SAME = frozenset({"dropout", "nested", "nested_mixed_float16"})

SAME = sorted(set(ZOO) - NOT_THE_SAME)
# Together they have mixed precision, and variables and layers that stages share. Long connections,
# several inputs and outputs are below, statistics of batches in test_saving.py, masks in
# test_totals.py.
USUAL = [
    "gpt_mixed_float16",
]
PAIRS = list(itertools.product(SAME, SCHEDULES))


def check(ranks, pipeline, name, schedule, microbatches=4, remat=False, xla=False):
    """Trains on a pipeline and in one process, and compares all there is."""
    train = ("tests.pipeline.behaviours:train",)
    if xla:
        train = ("tests.strategy.behaviours.xla:as_elsewhere", *train)
    arguments = (name, schedule, microbatches, pipeline, name in BY_MICROBATCHES, remat)
    # One process has neither a schedule nor ranks, and nothing to run again.
    alone = (name, "", microbatches, 1, name in BY_MICROBATCHES)
    expected = reference("tests.pipeline.behaviours:train", *alone)
    weights = expected.pop("weights")
    held, fewest = {}, len(weights)
    # XLA computes functions such as tanh in other ways, which add up over layers and steps.
    tolerance = 5e-3 if "float16" in name else 3e-5 if xla else 1e-5
    results = GROUPS[ranks].run(*train, *arguments)
    for rank, result in enumerate(results):
        own = result.pop("weights")
        # One rank may share all that the others hold.
        fewest = min(fewest, len(own))
        assert_close(result, expected, f"rank {rank}", tolerance)
        for i, value in own.items():
            np.testing.assert_allclose(
                value, weights[i], rtol=tolerance, atol=tolerance, err_msg=f"variable {i}"
            )
            assert np.array_equal(held.setdefault(i, value), value), f"variable {i}"
    assert set(held) == set(weights)
    assert fewest < len(weights)


@pytest.mark.parametrize(
    "name",
    some(SAME, always=[], smoke=["encoder_decoder"], oldest=["encoder_decoder", "unet"]),
)
def test_every_model_of_the_zoo(name):
    check("2", 2, name, "1f1b")


@exhaustive
@pytest.mark.parametrize("name", SAME)
def test_compiled_by_xla(name):
    check("2", 2, name, "1f1b", xla=True)


LATER = [schedule for schedule in SCHEDULES if schedule != "1f1b"]
OTHERS = [pair for pair in PAIRS if pair[1] != "1f1b"]


@pytest.mark.parametrize(
    ("name", "schedule"),
    some(OTHERS, always=[("mlp", "dualpipev")], covering=spread(SAME, LATER, 3)),
)
def test_every_schedule_trains_as_one_process(name, schedule):
    check("2", 2, name, schedule)


@exhaustive
def test_a_schedule_of_ones_own():
    check("2", 2, "mlp", "own")


@pytest.mark.parametrize(
    ("name", "schedule"),
    some([("gpt", "1f1b"), ("gpt", "zb_h1"), ("unet", "zb_h1")], always=[]),
)
def test_recomputing_the_forward_pass(name, schedule):
    check("2", 2, name, schedule, remat=True)


@pytest.mark.parametrize(
    "name",
    some(["encoder_decoder", "gpt_masked_loss", "several_outputs"], always=[]),
)
def test_two_pipelines_side_by_side(name):
    check("4", 2, name, "1f1b")


@exhaustive
@pytest.mark.parametrize("name", ["gpt_masked_loss", "several_outputs"])
def test_two_pipelines_compiled_by_xla(name):
    check("4", 2, name, "1f1b", xla=True)


@exhaustive
def test_two_pipelines_of_three():
    check("6 on 5 hosts", 3, "encoder_decoder", "zb_h1")


@pytest.mark.parametrize(
    ("name", "schedule"), some(PAIRS, always=[], covering=spread(SAME, [*SCHEDULES], 3))
)
def test_four_ranks_train_as_one_process(name, schedule):
    check("4", 4, name, schedule)


GPUS = ["2 GPUs by own kernels", "2 GPUs by NCCL", "2 GPUs through the host", "2 GPUs on 2 hosts"]


@exhaustive
@pytest.mark.parametrize("ranks", GPUS)
@pytest.mark.parametrize("name", USUAL)
def test_pipelines_on_gpus_train_as_one_process(ranks, name):
    check(ranks, 2, name, "1f1b")


@exhaustive
@pytest.mark.parametrize("ranks", GPUS)
@pytest.mark.parametrize("name", USUAL)
def test_on_gpus_compiled_by_xla(ranks, name):
    if gpus.have_devices():
        pytest.skip("XLA has no compiler for this device: pip install tensorflow")
    check(ranks, 2, name, "1f1b", xla=True)


@exhaustive
@pytest.mark.parametrize("name", ["gpt_masked_loss", "several_outputs", "shared"])
def test_two_pipelines_on_gpus(name):
    check("4 GPUs", 2, name, "1f1b")
