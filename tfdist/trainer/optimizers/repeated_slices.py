"""Sparse gradients on GPUs: slices of one index are added in one order.

GPUs scatter slices in an order that changes from run to run, and with it the last bits of a sum.
All replicas have the same slices, and would still drift apart. So the slices are sorted and added
up before TensorFlow scatters them, into a variable or into a dense gradient. Up to there they stay
as they are, since Keras squares each of them by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.trainer.optimizers.gradient_sync import has_replicas
from tfdist.trainer.patching import patch


def install() -> None:
    """Wraps what adds slices to variables, and their conversion to tensors."""
    patch("TFOptimizer.assign_add", _of_added_slices)
    patch("TFOptimizer.assign_sub", _of_added_slices)
    tf.register_tensor_conversion_function(tf.IndexedSlices, _to_tensor, priority=_BEFORE_OTHERS)


_BEFORE_OTHERS = 50  # TensorFlow's own has 100.


def _of_added_slices(assign: Callable[..., Any]) -> Callable[..., Any]:
    def assign_in_order(self: Any, variable: Any, value: Any) -> Any:
        if isinstance(value, tf.IndexedSlices) and _order_matters():
            value = add_repeated(value)
        return assign(self, variable, value)

    return assign_in_order


def _to_tensor(slices: Any, dtype: Any = None, name: Any = None, as_ref: bool = False) -> Any:
    if not _order_matters() or slices.dense_shape is None or dtype not in (None, slices.dtype):
        return NotImplemented
    sums = add_repeated(slices)
    return tf.math.unsorted_segment_sum(sums.values, sums.indices, sums.dense_shape[0], name)


def _order_matters() -> bool:
    return has_replicas(tf.distribute.get_strategy()) and adds_in_any_order()


def adds_in_any_order() -> bool:
    """Whether there are GPUs, which add slices of one index as they come."""
    return bool(tf.config.list_logical_devices("GPU"))


def add_repeated(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Adds up the slices of each index, in pairs, pairs of pairs, and so on.

    Args:
        slices: of any order; an index may be there several times.

    Returns:
        As many slices, by rising indices. The first one of each index is the sum, the others are
        zeros, which change nothing in whatever order they are added.

    Example:
        >>> slices = tf.IndexedSlices(tf.constant([1.0, 2.0, 3.0]), tf.constant([5, 4, 5]))
        >>> sums = add_repeated(slices)
        >>> sums.indices.numpy().tolist(), sums.values.numpy().tolist()
        ([4, 5, 5], [2.0, 4.0, 0.0])
    """
    order = tf.argsort(slices.indices, stable=True)
    indices, values = tf.gather(slices.indices, order), tf.gather(slices.values, order)
    count = tf.size(indices)
    rows = tf.range(count)
    # How many slices of the same index come before each.
    place = rows - tf.searchsorted(indices, indices)
    by_row = tf.concat([tf.shape(indices), tf.ones([tf.rank(values) - 1], tf.int32)], axis=0)

    def where(chosen: tf.Tensor, kept: tf.Tensor) -> tf.Tensor:
        return tf.where(tf.reshape(chosen, by_row), kept, tf.zeros_like(kept))

    def add_pairs(apart: tf.Tensor, sums: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        # What comes round to the front has too small a place to be of the same index.
        later = (rows + apart) % count
        are_pairs = (place % (2 * apart) == 0) & (tf.gather(place, later) == place + apart)
        return 2 * apart, sums + where(are_pairs, tf.gather(sums, later))

    _, sums = tf.while_loop(
        lambda apart, _: apart <= tf.reduce_max(place), add_pairs, (tf.constant(1), values)
    )
    return tf.IndexedSlices(where(place == 0, sums), indices, slices.dense_shape)
