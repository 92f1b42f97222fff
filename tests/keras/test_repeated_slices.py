"""The sums of slices that have the same index."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.harness.tiers import exhaustive
from tfdist._src.keras.optimizers import repeated_slices
from tfdist._src.keras.optimizers.repeated_slices import add_repeated
from tfdist._src.keras.patching import install

pytestmark = exhaustive
SHAPES = [(0, 3, (2,)), (1, 3, (2,)), (500, 7, (4, 2)), (513, 1, ()), (9, 40, ())]


def sums(values, indices):
    slices = add_repeated(tf.IndexedSlices(values, indices, tf.constant([40])))
    return slices.values, slices.indices


@pytest.mark.parametrize("run", ["eagerly", "in_a_graph", "by_xla"])
@pytest.mark.parametrize("types", [("float32", "int64"), ("float16", "int32")])
def test_the_first_slice_of_an_index_is_the_sum(run, types):
    call = sums if run == "eagerly" else tf.function(sums, jit_compile=run == "by_xla")
    generator = np.random.default_rng(0)
    for count, kinds, shape in SHAPES:
        given = generator.normal(size=(count, *shape)).astype(types[0])
        indices = generator.integers(0, kinds, count).astype(types[1])
        values, rising = (each.numpy() for each in call(tf.constant(given), tf.constant(indices)))
        assert rising.tolist() == sorted(indices)
        for index in range(kinds):
            of_one = values[rising == index]
            if len(of_one):
                expected = given[indices == index].astype("float64").sum(0)
                tolerance = 1e-5 if types[0] == "float32" else 0.05
                np.testing.assert_allclose(of_one[0], expected, tolerance, tolerance)
            assert not of_one[1:].any()


def test_rows_of_no_known_number():
    shape = tf.TensorSpec([None, 2], "float32"), tf.TensorSpec([None], "int32")
    values, rising = tf.function(sums, input_signature=shape)(tf.ones([5, 2]), [3, 1, 3, 3, 1])
    assert rising.numpy().tolist() == [1, 1, 3, 3, 3]
    assert values.numpy()[:, 0].tolist() == [2, 0, 3, 0, 0]


def trained(optimizer, monkeypatch, ordered):
    """Weights after steps with repeated slices, and what has been added in order."""
    install()
    taken = []

    def adding(slices):
        taken.append(slices)
        return add_repeated(slices)

    monkeypatch.setattr(repeated_slices, "_order_matters", lambda: ordered)
    monkeypatch.setattr(repeated_slices, "add_repeated", adding)
    layer = keras.layers.Embedding(6, 3, embeddings_initializer="ones")
    layer.build()
    optimizer = keras.optimizers.get(optimizer)
    optimizer.build(layer.trainable_weights)

    @tf.function
    def step(indices):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(tf.gather(layer(indices), [0, 0, 1])))
        gradients = tape.gradient(loss, [layer.embeddings.value])
        assert isinstance(gradients[0], tf.IndexedSlices)
        assert not taken  # in the backward pass, where each replica has its own
        optimizer.apply(gradients, layer.trainable_weights)

    step(tf.constant([1, 1, 4]))
    return layer.embeddings.numpy(), taken


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adagrad"])
def test_updates_are_those_without_order(optimizer, monkeypatch):
    ordered, taken = trained(optimizer, monkeypatch, ordered=True)
    assert taken
    plain, taken = trained(optimizer, monkeypatch, ordered=False)
    assert not taken
    np.testing.assert_allclose(ordered, plain, rtol=1e-6)
