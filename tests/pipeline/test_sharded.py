"""Pipelines side by side whose workers share out the optimizers of their stages."""

from __future__ import annotations

import numpy as np
import pytest

from tests.harness.groups import GROUPS
from tests.harness.references import reference
from tests.harness.tiers import exhaustive, some
from tests.strategy.comparison import assert_close

PACKAGE = "tests.pipeline.sharded_behaviours"
AS_ELSEWHERE = f"{PACKAGE}:as_elsewhere"


def run(group, behaviour, *args):
    return GROUPS[group].run(AS_ELSEWHERE, behaviour, *args)


def check(results, expected, weights):
    """Results are those of one process; weights are so where they are, and equal on all."""
    held = {}
    of_one = expected.pop(weights)
    for rank, result in enumerate(results):
        result = dict(result)
        own = result.pop(weights)
        assert_close(result, expected, f"rank {rank}")
        for i, value in own.items():
            np.testing.assert_allclose(value, of_one[i], rtol=1e-5, atol=1e-5)
            assert np.array_equal(held.setdefault(i, value), value), f"variable {i}"
    assert set(held) == set(of_one)


@exhaustive
@pytest.mark.parametrize(
    ("group", "name", "pipeline"),
    [("4", "gpt_masked_loss", 2), ("4", "encoder_decoder", 2), ("2", "several_outputs", 1)],
)
def test_sharded_pipelines_train_as_one_process(group, name, pipeline):
    arguments = ("behaviours:train", name, "1f1b", 4, pipeline, False)
    check(run(group, *arguments), reference(AS_ELSEWHERE, *arguments), "weights")


@pytest.mark.parametrize(
    "behaviour",
    some(
        ["clipping_and_averaging", "overflow", "sample_weights"],
        always=[],
    ),
)
def test_sharded_pipelines_do_what_keras_does(behaviour):
    name = f"keras_behaviours:{behaviour}"
    check(run("4", name), reference(AS_ELSEWHERE, name), "own")


@exhaustive
@pytest.mark.parametrize("name", ["gpt", "mlp"])
def test_each_has_its_share(name):
    for own, whole in GROUPS["4"].run(f"{PACKAGE}:state", name, 2):
        assert own <= 1.1 * whole / 2


@exhaustive
@pytest.mark.parametrize("optimizer", ["adam", "nadam"])
def test_files_of_sharded_pipelines_are_whole(optimizer, tmp_path):
    arguments = ("integers", str(tmp_path), optimizer)
    results = run("4", "saving_behaviours:train_and_save", *arguments)
    reference = run("alone", "saving_behaviours:load", *arguments)[0]
    for where in (results, run("4", "saving_behaviours:load", *arguments)):
        for rank, result in enumerate(where):
            assert result.pop("held") < len(reference["weights"])
            assert_close(result, reference, f"rank {rank}")
    # Another number of pipelines, and none that shares.
    for group, behaviour in (("2", f"{PACKAGE}:as_elsewhere"), ("4", "")):
        for rank, result in enumerate(_load(group, behaviour, arguments)):
            result.pop("held")
            assert_close(result, reference, f"{group} of them, rank {rank}")


def _load(group, behaviour, arguments):
    name = "saving_behaviours:load"
    if behaviour:
        return GROUPS[group].run(behaviour, name, *arguments, 1)
    return GROUPS[group].run(f"tests.pipeline.{name}", *arguments)
