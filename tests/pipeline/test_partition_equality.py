"""The stages of a model make what the model makes, wherever it is cut."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

from tests.harness.tiers import some, spread
from tests.pipeline.chain import run_model, run_stages
from tests.pipeline.zoo import ZOO
from tfdist._src.internals.keras import get_keras_mask
from tfdist._src.pipeline.partition import cut_model, linearize

ROWS = 4
# Keras warns of masks that come into nested models, and passes them on.
pytestmark = pytest.mark.filterwarnings("ignore:Layer .* was passed an input with a mask")


@functools.cache
def whole(name, training):
    model = ZOO[name].build()
    inputs, _ = ZOO[name].batch(ROWS)
    return linearize(model), inputs, run_model(model, inputs, training)


def evenly(graph, stages):
    """As many calls in each stage."""
    return [round(n * len(graph.calls) / stages) for n in range(1, stages)]


CASES = list(itertools.product(ZOO, [2, 3, 4, "all"], [True, False]))
# Inference differs by the masks alone; a call a stage is the finest cut.
USUAL = [
    (name, stages, training)
    for name, stages, training in CASES
    if (stages == 3 and training and name in ("encoder_decoder", "unet"))
    or (stages == "all" and training and name == "nested")
    or (stages == 2 and not training and name == "rnn")
]

COVERING = [
    (name, stages, training)
    for i, (name, stages) in enumerate(spread(list(ZOO), [2, 3, 4, "all"], 3))
    for training in ((True, False) if stages == "all" else (i % 2 == 0,))
]


@pytest.mark.parametrize(
    ("name", "stages", "training"), some(CASES, always=USUAL, covering=COVERING)
)
def test_stages_make_what_the_model_makes(name, stages, training):
    graph, inputs, expected = whole(name, training)
    count = len(graph.calls) if stages == "all" else stages
    partition = cut_model(graph, evenly(graph, count))

    result = run_stages(partition, inputs, training)

    loose = 2e-2 if ZOO[name].policy == "mixed_float16" else 1e-5
    for own, other in zip(expected.outputs, result.outputs, strict=True):
        np.testing.assert_array_equal(own, other)
        assert_masks_equal(own, other)
    for own, other in zip(expected.state, result.state, strict=True):
        np.testing.assert_allclose(own, other, atol=1e-6)
    assert result.loss == pytest.approx(expected.loss, abs=1e-5)
    for own, other in zip(expected.gradients, result.gradients, strict=True):
        assert (own is None) == (other is None)
        if own is not None:
            # Gradients are added in another order.
            np.testing.assert_allclose(own, other, atol=loose * max(1.0, np.abs(own).max()))


def assert_masks_equal(one, other):
    one, other = get_keras_mask(one), get_keras_mask(other)
    assert (one is None) == (other is None)
    if one is not None:
        np.testing.assert_array_equal(one, other)


MASKED = [name for name, example in ZOO.items() if example.masked]


@pytest.mark.parametrize("name", some(MASKED, always=["gpt_masked", "rnn"]))
def test_masks_that_are_lost_on_the_way_are_missed(name):
    graph, inputs, expected = whole(name, False)
    partition = cut_model(graph, evenly(graph, 3))

    result = run_stages(partition, inputs, training=False, forget_masks=True)

    assert np.abs(expected.outputs[0] - result.outputs[0]).max() > 1e-3


@pytest.mark.parametrize("name", some(ZOO, always=["encoder_decoder", "shared", "unet"]))
def test_every_variable_is_in_the_stages_that_use_it(name):
    graph, _, _ = whole(name, True)
    model = graph.model
    partition = cut_model(graph, evenly(graph, 3))

    for kind in ("variables", "trainable_variables"):
        held = [{id(v) for v in getattr(stage, kind)} for stage in partition.stages]
        assert set().union(*held) == {id(v) for v in getattr(model, kind)}
        assert [len(own) for own in held] == [len(getattr(s, kind)) for s in partition.stages]

    shared = {id(s.variable): s.stages for s in partition.shared}
    for variable in model.variables:
        users = tuple(
            stage.index
            for stage in partition.stages
            if any(v is variable for call in stage.calls for v in call.variables)
        )
        assert shared.get(id(variable), users[:1]) == users
