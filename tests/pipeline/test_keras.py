"""What Keras offers, on a pipeline of two ranks and on two pipelines, against one process."""

from __future__ import annotations

import ast
import pathlib

import numpy as np
import pytest

from tests.harness.groups import GROUPS
from tests.harness.references import reference
from tests.harness.tiers import exhaustive
from tests.strategy.comparison import assert_close

_SOURCE = ast.parse((pathlib.Path(__file__).parent / "keras_behaviours.py").read_text())
BEHAVIOURS = [
    node.name
    for node in _SOURCE.body
    if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
]


def check(ranks, behaviour):
    """Compares a behaviour on a group of ranks with that of one process."""
    name = f"tests.pipeline.keras_behaviours:{behaviour}"
    expected = reference(name)
    weights = expected.pop("own")
    held = {}
    for rank, result in enumerate(GROUPS[ranks].run(name)):
        own = result.pop("own")
        assert_close(result, expected, f"rank {rank}")
        assert len(own) < len(weights)
        for i, value in own.items():
            np.testing.assert_allclose(value, weights[i], rtol=1e-5, atol=1e-5)
            assert np.array_equal(held.setdefault(i, value), value), f"variable {i}"
    assert set(held) == set(weights)


@exhaustive
@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_a_pipeline_does_what_one_process_does(behaviour):
    check("2", behaviour)


@exhaustive
@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_two_pipelines_do_what_one_process_does(behaviour):
    check("4", behaviour)


@exhaustive
@pytest.mark.parametrize("optimizer", ["clipped", "scaled"])
def test_a_stage_that_trains_nothing(optimizer):
    losses, weights = reference("tests.pipeline.untrained:train", optimizer)
    first, last = GROUPS["2"].run("tests.pipeline.untrained:train", optimizer)
    assert last[1] == []
    for own in (first, last):
        np.testing.assert_allclose(own[0], losses, rtol=1e-5)
    for own, expected in zip(first[1], weights, strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)
