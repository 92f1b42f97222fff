"""Compiled functions draw the numbers that TensorFlow draws."""

from __future__ import annotations

import itertools

import numpy as np
import tensorflow as tf

from tests.harness.tiers import exhaustive
from tfdist._src.xla.cluster_function import draws_other_numbers, replacement

KINDS = ("StatelessRandomUniformV2", "StatelessRandomNormalV2")
FLOATS = ("float16", "bfloat16", "float32")


def traced(draw):
    """An operation that draws numbers, and the numbers."""
    with tf.Graph().as_default():
        operation = draw().op
        while not operation.type.startswith("StatelessRandom"):
            operation = operation.inputs[0].op
    return operation, tf.function(draw)()


@exhaustive
def test_the_numbers_are_those_of_tensorflow():
    for kind, dtype in itertools.product(KINDS, FLOATS):
        check(kind, dtype)


def check(kind, dtype):
    def place():
        key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=[3, 5])
        return {"shape": [3, 7], "key": key, "counter": counter + tf.constant([9, 0], tf.uint64)}

    def draw():
        return getattr(tf.raw_ops, kind)(**place(), alg=1, dtype=tf.as_dtype(dtype))

    operation, expected = traced(draw)
    assert not draws_other_numbers(operation)
    from_bits = replacement(operation)
    numbers = tf.function(lambda: from_bits(*place().values(), 1), jit_compile=True)()
    assert numbers.dtype == expected.dtype
    numbers, expected = np.asarray(numbers, "float64"), np.asarray(expected, "float64")
    if "Uniform" in kind:
        assert np.array_equal(numbers, expected)
    np.testing.assert_allclose(
        numbers, expected, rtol=1e-5 if dtype == "float32" else 1e-2, atol=1e-6
    )


def test_which_numbers_xla_would_draw_otherwise():
    same = (
        lambda: tf.random.stateless_uniform([3], [1, 2]),
        lambda: tf.random.stateless_uniform([3], [1, 2], 0, 9, tf.int32),
    )
    others = (
        lambda: tf.random.stateless_normal([3], [1, 2], dtype=tf.float64),
        lambda: tf.random.stateless_uniform([3], [1, 2], alg="threefry"),
        lambda: tf.random.stateless_gamma([3], [1, 2], alpha=1.0),
        lambda: tf.random.uniform([3]),
        lambda: tf.random.stateless_truncated_normal([3], [1, 2]),
    )
    for number, draw in enumerate((*same, *others)):
        with tf.Graph().as_default() as graph:
            draw()
            found = [op for op in graph.get_operations() if draws_other_numbers(op)]
        assert bool(found) == (number >= len(same)), number
