"""Models of the zoo on real pipelines, against one process."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest

from tests.groups import GROUPS
from tests.pipeline.zoo import ZOO
from tests.strategies.comparison import assert_close
from tfdist.pipeline.schedules import SCHEDULES

# What one process computes differently when a batch comes in microbatches: statistics of the
# batch, random numbers, penalties that are sums over the rows. It then takes the same ones.
BY_MICROBATCHES = frozenset(
    {
        "dropout",
        "gpt",
        "gpt_lambda",
        "gpt_mixed_float16",
        "gpt_operation",
        "gpt_reversible",
        "mlp",
        "nested_layers",
        "penalties",
        "residual_cnn",
        "rnn",
        "unet",
    }
)
# Here a layer with a state is called in two stages, which see its changes only after a step; or
# masked losses come with random numbers, and are divided by what the whole batch leaves.
NOT_THE_SAME = frozenset({"dropout", "gpt_masked", "nested", "nested_mixed_float16"})

# The suite takes some of them; with this variable each model goes by each schedule, on two and
# four ranks, which takes long.
EVERYTHING = bool(os.environ.get("TFDIST_TEST_EVERYTHING"))
SOME_ON_FOUR = [
    ("encoder_decoder", "1f1b"),
    ("gpt", "zbv"),
    ("integers", "zb_h1"),
    ("nested_layers", "interleaved_zb"),
    ("residual_cnn", "interleaved"),
    ("rnn", "gpipe"),
    ("several_outputs", "looped_bfs"),
    ("unet", "dualpipev"),
]
SAME = sorted(set(ZOO) - NOT_THE_SAME)
PAIRS = list(itertools.product(SAME, SCHEDULES))

_references: dict[tuple[object, ...], dict[str, object]] = {}


def check(ranks, pipeline, name, schedule, microbatches=4, remat=False):
    """Trains on a pipeline and in one process, and compares all there is."""
    arguments = (name, schedule, microbatches, pipeline, name in BY_MICROBATCHES, remat)
    if name not in _references:
        _references[name] = GROUPS["alone"].run("tests.pipeline.behaviours:train", *arguments)[0]
    reference = dict(_references[name])
    weights = reference.pop("weights")
    held, fewest = {}, len(weights)
    tolerance = 5e-3 if "float16" in name else 1e-5
    results = GROUPS[ranks].run("tests.pipeline.behaviours:train", *arguments)
    for rank, result in enumerate(results):
        own = result.pop("weights")
        # One rank may share all that the others hold.
        fewest = min(fewest, len(own))
        assert_close(result, reference, f"rank {rank}", tolerance)
        for i, value in own.items():
            np.testing.assert_allclose(
                value, weights[i], rtol=tolerance, atol=tolerance, err_msg=f"variable {i}"
            )
            assert np.array_equal(held.setdefault(i, value), value), f"variable {i}"
    assert set(held) == set(weights)
    assert fewest < len(weights)


@pytest.mark.parametrize("name", SAME)
def test_every_model_of_the_zoo(name):
    check("2", 2, name, "1f1b")


@pytest.mark.parametrize("schedule", sorted(set(SCHEDULES) - {"1f1b"}))
@pytest.mark.parametrize("name", SAME if EVERYTHING else ["unet", "gpt"])
def test_every_schedule(name, schedule):
    check("2", 2, name, schedule)


def test_a_schedule_of_ones_own():
    check("2", 2, "unet", "own")


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_recomputing_the_forward_pass(schedule):
    check("2", 2, "gpt", schedule, remat=True)


@pytest.mark.parametrize("name", ["encoder_decoder", "gpt_masked_loss", "several_outputs"])
def test_two_pipelines_side_by_side(name):
    check("4", 2, name, "1f1b")


def test_two_pipelines_of_three():
    check("6 on 5 hosts", 3, "encoder_decoder", "zb_h1")


@pytest.mark.parametrize(("name", "schedule"), PAIRS if EVERYTHING else SOME_ON_FOUR)
def test_four_ranks(name, schedule):
    check("4", 4, name, schedule)
