"""Converts TensorFlow types to and from those that collectives support."""

from __future__ import annotations

import tensorflow as tf

REDUCIBLE = frozenset({tf.float16, tf.float32, tf.float64, tf.int32, tf.int64})
_BITS = {8: tf.int64, 4: tf.int32, 2: tf.int16, 1: tf.int8}


def to_summable(tensor: tf.Tensor) -> tf.Tensor:
    """Converts to a type that can be summed without loss of range.

    bfloat16 becomes float32, small integers int32, complex numbers pairs of floats.

    Raises:
        ValueError: values of the type cannot be summed (strings, resources).
    """
    dtype = tensor.dtype
    if dtype in REDUCIBLE:
        return tensor
    if dtype.is_complex:
        return tf.bitcast(tensor, dtype.real_dtype)
    if dtype.is_floating:
        return tf.cast(tensor, tf.float32)
    if dtype.is_integer or dtype.is_bool:
        return tf.cast(tensor, tf.int64 if dtype.size >= 4 else tf.int32)
    raise ValueError(f"A tensor of type {dtype.name} cannot be summed over workers.")


def to_native_summable(tensor: tf.Tensor) -> tf.Tensor:
    """As `to_summable`, but keeps bfloat16, which the native core sums in float32."""
    return tensor if tensor.dtype == tf.bfloat16 else to_summable(tensor)


def from_summable(value: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Converts a sum back to the type of the tensor passed to `to_summable`."""
    dtype = like.dtype
    if dtype == value.dtype:
        return value
    if dtype.is_complex:
        return tf.bitcast(value, dtype)
    return tf.cast(value, dtype)


def to_bits(tensor: tf.Tensor) -> tf.Tensor:
    """The bit pattern as int32 or int64, which a sum with zeros preserves."""
    dtype = tensor.dtype
    if dtype.is_bool:
        return tf.cast(tensor, tf.int32)
    bits = tf.bitcast(tensor, tf.int64 if dtype == tf.complex128 else _BITS[dtype.size])
    return bits if bits.dtype in REDUCIBLE else tf.cast(bits, tf.int32)


def from_bits(bits: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """The inverse of `to_bits`."""
    if dtype.is_bool:
        return tf.cast(bits, tf.bool)
    if dtype.size < 4:
        bits = tf.cast(bits, _BITS[dtype.size])
    return tf.bitcast(bits, dtype)
