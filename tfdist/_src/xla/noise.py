"""Random numbers of compiled functions: those that TensorFlow draws.

XLA and TensorFlow draw the same bits from a key and a counter (Philox), but turn them into numbers
in different ways. A compiled step has to give the same result as one that is not compiled, so here
TensorFlow's way is written as operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

_PHILOX, _AUTO = 1, 3
_SAME = (
    "StatelessRandomUniformFullIntV2",
    "StatelessRandomUniformIntV2",
    "StatelessRandomGetKeyCounter",
    "StatelessRandomGetAlg",
)
_CONTROL = ("StatelessIf", "StatelessWhile", "StatelessCase")
_OTHERS = ("Random", "Stateless", "Multinomial", "TruncatedNormal", "ParameterizedTruncatedNormal")
# Types of floats: their bits as integers, the bits of the mantissa, and those of 1.0.
_LAYOUTS = {
    tf.float16: (tf.uint16, 0x3FF, 0x3C00),
    tf.bfloat16: (tf.uint16, 0x7F, 0x3F80),
    tf.float32: (tf.uint32, 0x7FFFFF, 0x3F800000),
}


def draws_other_numbers(operation: Any) -> bool:
    """Whether XLA would draw other numbers, and nothing here makes the same of its bits."""
    if operation.type in _REPLACED:
        return operation.get_attr("dtype") not in _REPLACED_TYPES or not _is_philox(operation)
    return is_random(operation.type)


def is_random(kind: str) -> bool:
    """Whether XLA would draw other numbers for operations of this kind."""
    return kind.startswith(_OTHERS) and kind not in (*_SAME, *_CONTROL)


def replacement(operation: Any) -> Callable[..., tf.Tensor] | None:
    """A function of an operation's inputs that draws its numbers from bits; None for others."""
    draw = _REPLACED.get(operation.type)
    if draw is None:
        return None
    dtype = operation.get_attr("dtype")
    return lambda shape, key, counter, algorithm: draw(shape, key, counter, dtype)


def _uniform(shape: Any, key: Any, counter: Any, dtype: tf.DType) -> tf.Tensor:
    """As `UniformDistribution` of TensorFlow: random bits as the mantissa of a number in [1, 2)."""
    integers, mantissa, one = _LAYOUTS[dtype]
    drawn = _bits(shape, key, counter)
    bits = tf.bitwise.bitwise_or(tf.bitwise.bitwise_and(drawn, mantissa), one)
    return tf.bitcast(tf.cast(bits, integers), dtype) - 1


def _normal(shape: Any, key: Any, counter: Any, dtype: tf.DType) -> tf.Tensor:
    """Box and Muller's transform of pairs of uniform numbers, as `NormalDistribution`."""
    count = tf.reduce_prod(shape)
    pairs = (count + 1) // 2
    uniform = tf.reshape(_uniform([2 * pairs], key, counter, tf.float32), [pairs, 2])
    radius = tf.sqrt(-2 * tf.math.log(tf.maximum(uniform[:, 0], 1e-7)))
    angle = 2 * math.pi * uniform[:, 1]
    numbers = tf.stack([tf.sin(angle) * radius, tf.cos(angle) * radius], axis=1)
    return tf.cast(tf.reshape(tf.reshape(numbers, [-1])[:count], shape), dtype)


def _bits(shape: Any, key: Any, counter: Any) -> tf.Tensor:
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=shape, key=key, counter=counter, alg=_PHILOX, dtype=tf.uint32
    )


def _is_philox(operation: Any) -> bool:
    source = operation.inputs[3].op
    if source.type == "StatelessRandomGetAlg":  # Philox on CPUs and GPUs
        return True
    return tf.get_static_value(operation.inputs[3]) in (_PHILOX, _AUTO)


_REPLACED = {"StatelessRandomUniformV2": _uniform, "StatelessRandomNormalV2": _normal}
_REPLACED_TYPES = frozenset(_LAYOUTS)
