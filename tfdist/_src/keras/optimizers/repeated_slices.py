"""Adds sparse gradients on GPUs in a fixed order if slices have the same index.

GPUs scatter slices in an order that changes from run to run, which changes the last bits of a sum.
Replicas with the same slices would drift apart. So the slices are sorted and added up before an
optimizer scatters them, into a variable or into a dense gradient. Until then they stay separate,
since Keras squares each slice separately.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist._src.keras.optimizers.gradient_sync import are_summed, has_replicas
from tfdist._src.keras.patching import patch
from tfdist._src.strategy.step import this_thread

_BEFORE_OTHERS = 50  # TensorFlow's own conversion has 100.


def install() -> None:
    """Wraps the addition of slices to variables, and their conversion to tensors in an update."""
    patch("TFOptimizer.assign_add", _of_added_slices)
    patch("TFOptimizer.assign_sub", _of_added_slices)
    patch("TFOptimizer._distributed_tf_update_step", _converting_in_order)
    tf.register_tensor_conversion_function(tf.IndexedSlices, _to_tensor, priority=_BEFORE_OTHERS)


def _of_added_slices(assign: Callable[..., Any]) -> Callable[..., Any]:
    def assign_in_order(self: Any, variable: Any, value: Any) -> Any:
        if isinstance(value, tf.IndexedSlices) and _order_matters():
            value = add_repeated(tf.cast(value, variable.dtype))
        return assign(self, variable, value)

    return assign_in_order


def _converting_in_order(update: Callable[..., Any]) -> Callable[..., Any]:
    def update_in_order(
        self: Any, distribution: Any, grads_and_vars: Any, learning_rate: Any
    ) -> Any:
        before = this_thread.adds_slices_in_order
        this_thread.adds_slices_in_order = _order_matters()
        try:
            return update(self, distribution, grads_and_vars, learning_rate)
        finally:
            this_thread.adds_slices_in_order = before

    return update_in_order


def _to_tensor(slices: Any, dtype: Any = None, name: Any = None, as_ref: bool = False) -> Any:
    # Elsewhere, as in a backward pass, the slices are a replica's own: their order does not matter.
    of_all = this_thread.adds_slices_in_order or (are_summed() and _order_matters())
    if not of_all or slices.dense_shape is None or dtype not in (None, slices.dtype):
        return NotImplemented
    added = add_repeated(slices)
    return tf.math.unsorted_segment_sum(added.values, added.indices, added.dense_shape[0], name)


def _order_matters() -> bool:
    return has_replicas(tf.distribute.get_strategy()) and adds_in_any_order()


def adds_in_any_order() -> bool:
    """Whether there are GPUs, which add slices of one index in any order."""
    return bool(tf.config.list_logical_devices("GPU"))


def add_repeated(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Adds up the slices of each index, by a segmented scan.

    Source: Hillis and Steele, Data Parallel Algorithms, 1986.

    Args:
        slices: in any order; an index may occur several times.

    Returns:
        The same number of slices, sorted by int64 index. The first slice of each index is the sum;
        the other slices of the index are zeros, which have no effect in any order.

    Example:
        >>> slices = tf.IndexedSlices(tf.constant([1.0, 2.0, 3.0]), tf.constant([5, 4, 5]))
        >>> sums = add_repeated(slices)
        >>> sums.indices.numpy().tolist(), sums.values.numpy().tolist()
        ([4, 5, 5], [2.0, 4.0, 0.0])
    """
    # GPUs compute with int64; int32 tensors would be on the host.
    indices = tf.cast(slices.indices, tf.int64)
    order = tf.argsort(indices, stable=True)
    indices, values = tf.gather(indices, order), tf.gather(slices.values, order)
    count = tf.size(indices, tf.int64)
    rows = tf.range(count)
    by_row = tf.concat([tf.shape(indices), tf.ones([tf.rank(values) - 1], tf.int32)], axis=0)

    def where(chosen: tf.Tensor, kept: tf.Tensor) -> tf.Tensor:
        return tf.where(tf.reshape(chosen, by_row), kept, tf.zeros_like(kept))

    def repeats(apart: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns, for each row, the row `apart` rows later, and whether it has the same index."""
        later = tf.minimum(rows + apart, count - 1)
        return later, (later == rows + apart) & (tf.gather(indices, later) == indices)

    def add_later(apart: tf.Tensor, sums: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        later, repeated = repeats(apart)
        return 2 * apart, sums + where(repeated, tf.gather(sums, later))

    _, sums = tf.while_loop(
        lambda apart, _: tf.reduce_any(repeats(apart)[1]),
        add_later,
        (tf.constant(1, tf.int64), values),
    )
    before = tf.maximum(rows - 1, 0)
    is_first = (before == rows) | (tf.gather(indices, before) != indices)
    return tf.IndexedSlices(where(is_first, sums), indices, slices.dense_shape)
