"""Compiled functions draw the numbers that TensorFlow draws."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfdist.jit.noise import draws_other_numbers, replacement

FLOATS = ("float16", "bfloat16", "float32")


def traced(draw):
    """An operation that draws numbers, and the numbers."""
    with tf.Graph().as_default():
        operation = draw().op
        while not operation.type.startswith("StatelessRandom"):
            operation = operation.inputs[0].op
    return operation, tf.function(draw)()


@pytest.mark.parametrize("kind", ["StatelessRandomUniformV2", "StatelessRandomNormalV2"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_numbers_are_those_of_tensorflow(kind, dtype):
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


@pytest.mark.parametrize(
    ("draw", "others"),
    [
        (lambda: tf.random.stateless_uniform([3], [1, 2]), False),
        (lambda: tf.random.stateless_uniform([3], [1, 2], 0, 9, tf.int32), False),
        (lambda: tf.random.stateless_normal([3], [1, 2], dtype=tf.float64), True),
        (lambda: tf.random.stateless_uniform([3], [1, 2], alg="threefry"), True),
        (lambda: tf.random.stateless_gamma([3], [1, 2], alpha=1.0), True),
        (lambda: tf.random.uniform([3]), True),
        (lambda: tf.random.stateless_truncated_normal([3], [1, 2]), True),
    ],
)
def test_which_numbers_xla_would_draw_otherwise(draw, others):
    with tf.Graph().as_default() as graph:
        draw()
        found = [op for op in graph.get_operations() if draws_other_numbers(op)]
    assert bool(found) == others
