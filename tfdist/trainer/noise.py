"""Dropout and noise that are, row by row, what one process would draw.

All replicas hold the same seeds, and would draw the same numbers for their different rows. Here
a replica draws from the place in the random stream where one process would be at its first row:
the Philox generator yields any part of its stream directly (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", 2011).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.internals.keras import random
from tfdist.strategies.step import Step, current_step

# One step of the counter gives 128 bits: four numbers, or two of 64 bits each.
_PER_COUNT = {tf.float64: 2}
_PHILOX = 1


def install() -> None:
    """Replaces Keras's draws of noise inside a tfdist step."""
    dropout, uniform, normal = random.dropout, random.uniform, random.normal

    def drop(inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None) -> Any:
        step = current_step()
        if step is None or rate in (0.0, 1.0) or not _has_rows(noise_shape):
            return dropout(inputs, rate, noise_shape, seed)
        seed = random._cast_seed(random.draw_seed(seed))
        shape = random._get_concrete_noise_shape(inputs, noise_shape)
        numbers = _draw(step, tf.raw_ops.StatelessRandomUniformV2, shape, inputs.dtype, seed)
        kept = tf.where(numbers >= rate, inputs / (1 - rate), tf.zeros_like(inputs))
        return tf.ensure_shape(kept, inputs.shape)

    def draw_uniform(
        shape: Any, minval: Any = 0.0, maxval: Any = 1.0, dtype: Any = None, seed: Any = None
    ) -> Any:
        step = current_step()
        if step is None or not _has_rows(shape):
            return uniform(shape, minval, maxval, dtype, seed)
        dtype = tf.as_dtype(dtype or random.floatx())
        seed = random._cast_seed(random.draw_seed(seed))
        numbers = _draw(step, tf.raw_ops.StatelessRandomUniformV2, shape, dtype, seed)
        low, high = tf.cast(minval, dtype), tf.cast(maxval, dtype)
        return numbers * (high - low) + low

    def draw_normal(
        shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None, seed: Any = None
    ) -> Any:
        step = current_step()
        if step is None or not _has_rows(shape):
            return normal(shape, mean, stddev, dtype, seed)
        dtype = tf.as_dtype(dtype or random.floatx())
        seed = random._cast_seed(random.draw_seed(seed))
        numbers = _draw(step, tf.raw_ops.StatelessRandomNormalV2, shape, dtype, seed)
        return numbers * tf.cast(stddev, dtype) + tf.cast(mean, dtype)

    random.dropout, random.uniform, random.normal = drop, draw_uniform, draw_normal


def _has_rows(shape: Any) -> bool:
    # Noise whose first dimension is a fixed one is shared by the rows, as in one process.
    if shape is None or tf.is_tensor(shape):
        return True
    return len(shape) > 0 and not (isinstance(shape[0], int) and shape[0] == 1)


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
    numbers = draw(shape=[count + lead], key=key, counter=counter, alg=_PHILOX, dtype=dtype)
    return tf.reshape(numbers[lead:], shape)
