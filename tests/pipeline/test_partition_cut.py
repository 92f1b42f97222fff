"""What passes between stages, and what they share."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.harness.tiers import exhaustive
from tests.pipeline.chain import run_model, run_stages
from tests.pipeline.zoo import ZOO, gpt, mlp, penalties, several_outputs, shared, unet
from tfdist._src.pipeline.partition import cut_model, linearize, pack, specs
from tfdist._src.pipeline.partition import partition as partition_by_numbers
from tfdist.errors import PartitionError


def test_skips_go_straight_to_where_they_are_used():
    graph = linearize(unet())
    calls = [call.name.rstrip("_0123456789") for call in graph.calls]
    partition = cut_model(graph, [calls.index("spatial_dropout2d"), calls.index("concatenate")])
    edges = {(edge.source, edge.target): edge.keys for edge in partition.edges}
    (first,) = (key for key in edges[0, 2] if graph.specs[key].shape[1] == 16)
    assert sorted(edges) == [(0, 1), (0, 2), (1, 2)]
    assert len(edges[0, 1]) == len(edges[1, 2]) == 1
    assert partition.where(first) == 0
    assert partition.where(graph.inputs[0]) is None


def test_outputs_made_early_go_to_the_last_stage():
    graph = linearize(several_outputs())
    names = [call.name for call in graph.calls]
    early, main = graph.outputs
    partition = cut_model(graph, [names.index("early") + 1, len(names) - 1])
    assert [partition.where(key) for key in (early, main)] == [0, 2]
    assert partition.stages[-1].outputs == tuple(sorted((early, main)))
    assert early in next(e.keys for e in partition.edges if (e.source, e.target) == (0, 2))
    a, b, late = graph.inputs
    assert [partition.model_inputs(stage) for stage in range(3)] == [(a, b), (late,), ()]


def test_an_input_may_be_an_output():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, [layers.Dense(2)(layers.Dense(3)(inputs)), inputs])
    partition = cut_model(linearize(model), [1])
    assert partition.model_inputs(1) == partition.graph.inputs
    batch = np.ones((2, 4), np.float32)
    expected = run_model(model, batch, False)
    for own, other in zip(
        expected.outputs, run_stages(partition, batch, False).outputs, strict=True
    ):
        np.testing.assert_array_equal(own, other)


def test_integers_pass_without_gradients():
    graph = linearize(ZOO["integers"].build())
    partition = cut_model(graph, [4])
    (edge,) = partition.edges
    types = {key: graph.specs[key].dtype for key in edge.keys}
    assert set(types.values()) == {"float32", "int32"}
    assert edge.differentiable == tuple(key for key in edge.keys if types[key] == "float32")


def test_values_without_rows_pass_too():
    inputs = keras.Input((4,))
    x = layers.Dense(4)(inputs)
    model = keras.Model(inputs, layers.Dense(2)(x * keras.ops.mean(keras.ops.square(x))))
    partition = cut_model(linearize(model), [1, 2, 3, 4])
    assert specs(partition, partition.edges[-2], 8)[0].shape == ()
    batch = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    expected = run_model(model, batch, True)
    result = run_stages(partition, batch, True)
    np.testing.assert_array_equal(expected.outputs[0], result.outputs[0])
    assert len(partition_by_numbers(model, 3, rows=8).stages) == 3


def test_tied_variables_belong_to_the_first_stage():
    model = gpt()
    partition = cut_model(linearize(model), [5, 9])
    (tied,) = partition.shared
    assert tied.variable is model.get_layer("embedding").embeddings
    assert tied.stages == (0, 2)


def test_a_regularizer_of_a_shared_variable_counts_once():
    model = shared()
    partition = cut_model(linearize(model), [1, 2, 3])
    kernel, bias = model.get_layer("again").variables
    assert [(s.variable, s.stages) for s in partition.shared] == [
        (kernel, (0, 1, 2, 3)),
        (bias, (0, 1, 2, 3)),
    ]
    inputs, _ = ZOO["shared"].batch(2)
    values = partition.graph.unpack_inputs(inputs)
    counts = []
    for stage in partition.stages:
        values.update(stage(values, True))
        counts.append(len(stage.losses()))
    assert counts == [1, 0, 0, 0]


def test_losses_of_layers_are_those_of_the_last_call():
    graph = linearize(penalties())
    inputs, _ = ZOO["penalties"].batch(2)
    first, _ = cut_model(graph, [2]).stages
    for _ in range(3):
        first(graph.unpack_inputs(inputs), True)
        assert len(first.losses()) == 3


def test_frozen_layers_are_not_trained():
    model = mlp()
    partition = cut_model(linearize(model), [3])
    model.layers[1].trainable = False
    trained = [v for stage in partition.stages for v in stage.trainable_variables]
    assert list(map(id, trained)) == list(map(id, model.trainable_variables))
    assert len(partition.stages[0].losses()) == 0


@exhaustive
def test_stages_run_inside_a_trace():
    graph = linearize(ZOO["encoder_decoder"].build())
    inputs, _ = ZOO["encoder_decoder"].batch(3)
    partition = cut_model(graph, [6, 14])

    def run(batch):
        values = dict(batch)
        for stage in partition.stages:
            values.update(stage({key: values[key] for key in stage.inputs}, False))
        return graph.pack_outputs(values)

    batch = graph.unpack_inputs(inputs)
    np.testing.assert_allclose(tf.function(run)(batch), run(batch), atol=1e-5)


def test_a_mask_that_the_model_promises_must_be_there():
    graph = linearize(ZOO["rnn"].build())
    partition = cut_model(graph, [2])
    (edge,) = (edge for edge in partition.edges if edge.masked)
    values = {
        key: tf.zeros(spec.shape)
        for key, spec in zip(edge.keys, specs(partition, edge, 2), strict=False)
    }
    with pytest.raises(PartitionError, match="no mask from 'embedding"):
        pack(partition, edge, values)


@pytest.mark.parametrize("boundaries", [[0], [9], [3, 3], [4, 2], [-1]])
def test_every_stage_has_calls(boundaries):
    graph = linearize(mlp())
    with pytest.raises(PartitionError, match="boundaries must increase strictly"):
        cut_model(graph, boundaries)
