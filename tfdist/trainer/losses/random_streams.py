"""Dropout and noise that are identical, row by row, to those of a single process.

All replicas hold the same seeds and would draw the same numbers for their different rows. Here a
replica draws from the position in the random stream where a single process would be at its first
row: the Philox generator provides random access to its stream (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", 2011).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.internals.keras import dropout_shape, random, seed_for_draw
from tfdist.strategies.step import Step, replicated_step
from tfdist.trainer.patching import patch

# Each increment of the counter yields 128 bits: four 32-bit numbers, or two of 64 bits.
_PER_COUNT = {tf.float64: 2, tf.int64: 2}
_PHILOX = 1


def install() -> None:
    """Replaces how Keras draws noise inside a tfdist step."""
    patch("random.dropout", lambda original: _by_rows(original, _dropout, _drops_for_rows))
    patch("random.uniform", lambda original: _by_rows(original, _uniform, is_for_rows))
    patch("random.normal", lambda original: _by_rows(original, _normal, is_for_rows))
    patch("random.randint", lambda original: _by_rows(original, _randint, is_for_rows))


def _by_rows(keras_draws: Any, draws: Any, for_rows: Callable[..., bool]) -> Any:
    """Wraps a function of Keras to draw by rows if the noise is for the rows of the batch."""

    @functools.wraps(keras_draws)
    def draw(*args: Any, seed: Any = None, **kwargs: Any) -> Any:
        step = replicated_step()
        if step is None or not for_rows(step, *args, **kwargs):
            return keras_draws(*args, seed=seed, **kwargs)
        return draws(step, *args, seed=seed_for_draw(seed), **kwargs)

    return draw


def is_for_rows(step: Step, shape: Any, *_: Any, **__: Any) -> bool:
    """Whether noise of a shape differs per row of the batch."""
    if tf.is_tensor(shape):
        known = tf.get_static_value(shape)
        shape = [None] if known is None else known.tolist()
    first = shape[0] if len(shape) else 1
    # Noise with another static first dimension is for weights, or shared by the rows.
    return not isinstance(first, int) or first == tf.get_static_value(step.rows)


def _drops_for_rows(step: Step, x: Any, rate: float, noise_shape: Any = None) -> bool:
    first = x.shape[0] if noise_shape is None or noise_shape[0] is None else noise_shape[0]
    if is_for_rows(step, [first]):
        return True
    # A row may have several entries, such as the windows of an image.
    rows = tf.get_static_value(step.rows)
    return rows is not None and rows > 1 and first % rows == 0


def _dropout(
    step: Step, inputs: Any, rate: float, noise_shape: Any = None, *, seed: tf.Tensor
) -> tf.Tensor:
    if rate in (0.0, 1.0):
        return inputs if rate == 0.0 else tf.zeros_like(inputs)
    shape = dropout_shape(inputs, noise_shape)
    numbers = _draw(step, tf.raw_ops.StatelessRandomUniformV2, shape, inputs.dtype, seed)
    kept = tf.where(numbers >= rate, inputs / (1 - rate), tf.zeros_like(inputs))
    return tf.ensure_shape(kept, inputs.shape)


def _uniform(
    step: Step,
    shape: Any,
    minval: Any = 0.0,
    maxval: Any = 1.0,
    dtype: Any = None,
    *,
    seed: tf.Tensor,
) -> tf.Tensor:
    dtype = tf.as_dtype(dtype or random.floatx())
    numbers = _draw(step, tf.raw_ops.StatelessRandomUniformV2, shape, dtype, seed)
    low, high = tf.cast(minval, dtype), tf.cast(maxval, dtype)
    return numbers * (high - low) + low


def _normal(
    step: Step,
    shape: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = None,
    *,
    seed: tf.Tensor,
) -> tf.Tensor:
    dtype = tf.as_dtype(dtype or random.floatx())
    numbers = _draw(step, tf.raw_ops.StatelessRandomNormalV2, shape, dtype, seed)
    return numbers * tf.cast(stddev, dtype) + tf.cast(mean, dtype)


def _randint(
    step: Step, shape: Any, minval: Any, maxval: Any, dtype: Any = "int32", *, seed: tf.Tensor
) -> tf.Tensor:
    drawn = tf.as_dtype(dtype) if dtype in ("int32", "int64") else tf.int64
    low, high = tf.cast(minval, drawn), tf.cast(maxval, drawn)

    def draw(dtype: tf.DType, **place: Any) -> tf.Tensor:
        return tf.raw_ops.StatelessRandomUniformIntV2(minval=low, maxval=high, **place)

    return tf.cast(_draw(step, draw, shape, drawn, seed), dtype)


def _draw(
    step: Step, draw: Callable[..., tf.Tensor], shape: Any, dtype: tf.DType, seed: tf.Tensor
) -> tf.Tensor:
    shape = tf.convert_to_tensor(shape, tf.int32)
    count = tf.reduce_prod(tf.cast(shape, tf.int64))
    rows = tf.cast(tf.maximum(step.rows, 1), tf.int64)
    by_rows = tf.cast(shape[0], tf.int64) % rows == 0
    skipped = tf.where(by_rows, tf.cast(step.first_row, tf.int64) * (count // rows), 0)
    block = _PER_COUNT.get(dtype, 4)
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    counter += tf.cast(tf.stack([skipped // block, 0]), tf.uint64)
    lead = skipped % block
    # A few more than needed: for XLA, how many are drawn may not depend on where.
    numbers = draw(shape=[count + block - 1], key=key, counter=counter, alg=_PHILOX, dtype=dtype)
    return tf.reshape(tf.slice(numbers, [lead], [count]), shape)
