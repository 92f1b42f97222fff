"""A model is written down as the calls that Keras makes, the same in all processes."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.harness.tiers import exhaustive
from tests.pipeline.chain import run_model, run_stages
from tests.pipeline.layers import Block
from tests.pipeline.zoo import ZOO, gpt, nested, several_outputs
from tfdist._src.internals.keras import get_keras_mask
from tfdist._src.pipeline.partition import Spec, cut_model, linearize, measure, pack
from tfdist.errors import PartitionError


def names(model):
    return [call.name for call in linearize(model).calls]


def test_nested_models_are_dissolved():
    assert names(nested()) == [
        *("one/dense", "one/norm", "one/out", "one/add"),
        *("outer/inner/dense", "outer/inner/dropout", "outer/dense"),
        "block",
        *("two/dense", "two/norm", "two/out", "two/add"),
        *("one/dense#2", "one/norm#2", "one/out#2", "one/add#2"),
        "head",
    ]


@pytest.mark.filterwarnings("ignore:Layer .* was passed an input with a mask")
def test_nested_models_with_masks_are_dissolved_too():
    calls = names(ZOO["nested_masks"].build())
    assert {"first/gru", "second/lstm", "third/gru"} <= {
        name.rstrip("_0123456789") for name in calls
    }


@pytest.mark.filterwarnings("ignore:Layer .* was passed an input with a mask")
def test_a_nested_model_sees_the_mask_that_it_was_given():
    # Keras passes it as an argument, though attention has taken it from the value before.
    def around(second):
        inner = keras.Input((None, 4))
        other = keras.Input((None, 4))
        x = layers.GRU(4, return_sequences=True)(inner)
        if second:
            return keras.Model([inner, other], x + layers.GRU(4, return_sequences=True)(other))
        return keras.Model(inner, x)

    for second in (False, True):
        inputs = keras.Input((6,), dtype="int32")
        x = layers.Embedding(9, 4, mask_zero=True)(inputs)
        y = layers.MultiHeadAttention(1, 4)(x, x)
        y = layers.Dense(4)(layers.Dense(4)(y))
        z = around(second)([x, x] if second else x)
        model = keras.Model(inputs, layers.Add()([y, z]))
        partition = cut_model(linearize(model), [2, 4])
        batch = np.array([[1, 2, 0, 0, 0, 0], [3, 4, 5, 0, 0, 0]])
        expected, result = run_model(model, batch, False), run_stages(partition, batch, False)
        np.testing.assert_array_equal(expected.outputs[0], result.outputs[0])


@exhaustive
def test_values_are_numbered_alike_wherever_the_model_is_built():
    def numbers(model):
        graph = linearize(model)
        return graph.inputs, graph.outputs, [(c.inputs, c.outputs) for c in graph.calls]

    for example in (ZOO["gpt_masked"], ZOO["several_outputs"], ZOO["nested"]):
        assert numbers(example.build()) == numbers(example.build())


def test_inputs_and_outputs_keep_their_structure():
    graph = linearize(several_outputs())
    batch = {"a": np.zeros((2, 8)), "b": np.ones((2, 8)), "late": np.zeros((2, 4), np.float16)}
    values = graph.unpack_inputs(batch)
    assert [values[key].dtype for key in graph.inputs] == [tf.float32] * 3
    assert graph.specs[graph.inputs[2]] == Spec((None, 4), "float32")
    packed = graph.pack_outputs({key: key for key in graph.outputs})
    assert packed == dict(zip(("early", "main"), graph.outputs, strict=True))


def test_what_training_a_nested_model_says_holds_where_the_model_is_told_nothing():
    inner = keras.Sequential([keras.Input((50,)), layers.Dropout(0.5)], name="inner")
    inputs = keras.Input((50,))
    model = keras.Model(inputs, inner(inputs, training=True))
    graph = linearize(model)
    (stage,) = cut_model(graph, []).stages
    for training in (None, True, False):
        zeros = [
            np.any(np.equal(run, 0))
            for run in (
                model(np.ones((2, 50)), training=training),
                graph.pack_outputs(stage(graph.unpack_inputs(np.ones((2, 50))), training)),
            )
        ]
        assert zeros == [training is not False] * 2


def test_a_model_that_does_more_than_its_calls_stays_whole():
    class Doubled(keras.Model):
        def call(self, x):
            return 2 * super().call(x)

    def inner(kind):
        inputs = keras.Input((4,))
        return kind(inputs, layers.Dense(4)(inputs), name="inner")

    inputs = keras.Input((4,))
    assert names(keras.Model(inputs, inner(keras.Model)(inputs)))[0].startswith("inner/")
    assert names(keras.Model(inputs, inner(Doubled)(inputs))) == ["inner"]
    assert names(keras.Model(inputs, Block(4, name="block")(inputs))) == ["block"]
    # Such a model puts the masks of its inputs on its outputs.
    masking = inner(keras.Model)
    masking.supports_masking = True
    assert names(keras.Model(inputs, masking(inputs))) == ["inner"]
    # This one is called with an axis that it adds itself.
    flat = keras.Input((4, 1))
    fixed = keras.Model(flat, layers.Flatten()(flat), name="inner")
    assert names(keras.Model(inputs, fixed(inputs))) == ["inner"]


def test_attention_takes_masks_from_its_inputs():
    # What comes later and takes the same values sees no mask, wherever it is cut.
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(9, 4, mask_zero=True)(inputs)
    y = layers.MultiHeadAttention(1, 4)(x, x)
    model = keras.Model(inputs, layers.Concatenate()([layers.Dense(4)(y), x]))
    graph = linearize(model)
    made = {call.name.rstrip("_0123456789"): call.outputs[0] for call in graph.calls}
    after = next(n for n, c in enumerate(graph.calls) if "attention" in c.name) + 1
    assert graph.mask_before(made["embedding"], after - 1) == Spec((None, 6), "bool")
    assert graph.mask_before(made["embedding"], after) is None
    partition = cut_model(graph, [after - 1, after])
    edges = {(e.source, e.target): e for e in partition.edges}
    assert edges[0, 1].masked == (made["embedding"],)
    assert edges[0, 2].masked == ()


def test_a_stage_leaves_the_tensors_of_its_caller_alone():
    graph = linearize(ZOO["gpt_masked"].build())
    inputs, _ = ZOO["gpt_masked"].batch(2)
    attention = next(n for n, c in enumerate(graph.calls) if c.name == "attention_0")
    first, second = cut_model(graph, [attention]).stages
    made = first(graph.unpack_inputs(inputs), False)
    masks = {key: get_keras_mask(value) for key, value in made.items()}
    second(made, False)
    assert any(mask is not None for mask in masks.values())
    assert all(get_keras_mask(made[key]) is mask for key, mask in masks.items())


@exhaustive
@pytest.mark.parametrize("name", ["gpt_masked", "nested", "several_outputs", "unet"])
def test_models_without_values_are_cut_and_measured(name):
    expected = ZOO[name].build()
    with keras.StatelessScope(initialize_variables=False):
        model = ZOO[name].build()
    waiting = [v for v in model.variables if v._value is None]
    assert len(waiting) == len(model.variables)

    graph = linearize(model)
    partition = cut_model(graph, [3])
    costs = measure(graph, rows=2)
    assert len(costs) == len(graph.calls)
    assert sum(c.parameters for c in costs) >= expected.count_params()
    assert all(v._value is None for v in model.variables)

    # Keras gives values to what waits for them at the end of the next scope.
    with keras.StatelessScope():
        pass
    for variable, other in zip(model.variables, expected.variables, strict=True):
        variable.assign(other)
    inputs, _ = ZOO[name].batch(2)
    values = graph.unpack_inputs(inputs)
    for stage in partition.stages:
        values.update(stage(values, False))
    flat = keras.tree.flatten(graph.pack_outputs(values))
    for own, other in zip(keras.tree.flatten(expected(inputs)), flat, strict=True):
        np.testing.assert_array_equal(own, other)


def test_what_a_layer_passes_on_as_it_is_keeps_a_mask_of_its_own():
    # Without training, dropout returns its input, from which attention then takes the mask.
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(9, 4, mask_zero=True)(inputs)
    y = layers.Dropout(0.1)(x)
    y = layers.MultiHeadAttention(1, 4, name="attention")(y, y)
    graph = linearize(keras.Model(inputs, layers.Add()([x, y])))
    after = next(n for n, c in enumerate(graph.calls) if c.name == "attention") + 1
    partition = cut_model(graph, [after])
    made = partition.stages[0](graph.unpack_inputs(np.array([[1, 2, 0, 0, 0, 0]])), False)
    (edge,) = partition.edges
    assert len(edge.masked) == 2
    assert len(pack(partition, edge, made)) == len(edge.keys) + 2


def test_nested_models_take_their_own_types():
    inner = keras.Input((3,))
    nested_model = keras.Model(inner, inner * 1.001 + 0.1, name="inner")
    inputs = keras.Input((3,), dtype="float16")
    model = keras.Model(inputs, nested_model(inputs))
    graph = linearize(model)
    assert graph.calls[0].name == "inner_input"
    batch = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float16)
    (stage,) = cut_model(graph, []).stages
    made = graph.pack_outputs(stage(graph.unpack_inputs(batch), False))
    assert made.dtype == tf.float32
    np.testing.assert_array_equal(made, model(batch))


def test_models_without_a_graph():
    subclassed = Block(4, name="mine")
    with pytest.raises(PartitionError, match=r"Received: 'mine', a Block with a custom call\(\)"):
        linearize(subclassed)
    with pytest.raises(PartitionError, match="Sequential model 'later', which is not built"):
        linearize(keras.Sequential([layers.Dense(2)], name="later"))
    with pytest.raises(PartitionError, match=r"a Dense. Pass a keras.Model"):
        linearize(layers.Dense(2))


def test_a_variable_used_without_its_layer_is_that_of_the_call():
    for head in ("operation", "lambda"):
        model = gpt(head=head)
        call = linearize(model).calls[-1]
        (variable,) = call.reads
        assert variable is model.get_layer("embedding").embeddings


def test_layers_that_cannot_be_traced_keep_the_masks_that_keras_knows():
    class Numbers(layers.Layer):
        def __init__(self):
            super().__init__()
            self.supports_masking = True

        def call(self, x):
            return x * float(np.mean(x.numpy()))

        def compute_output_shape(self, shape):
            return shape

    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(9, 4, mask_zero=True)(inputs)
    graph = linearize(keras.Model(inputs, Numbers()(x)))
    assert graph.mask_before(graph.outputs[0], len(graph.calls)) == Spec((None, 6), "bool")
