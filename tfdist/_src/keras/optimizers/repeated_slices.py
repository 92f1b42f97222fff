"""Makes GPUs add the slices of sparse gradients in a fixed order.

If several slices have the same index, a GPU adds them in an order that changes from run to run, and
with it the last bits of the sum. Replicas with the same slices would drift apart. So the slices are
sorted and added up immediately before an optimizer scatters them into a variable or into a dense
gradient. Before this point they must stay separate, because Keras squares each slice separately.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist._src.keras.optimizers.gradient_sync import are_summed, has_replicas
from tfdist._src.keras.patching import patch
from tfdist._src.strategy.step import this_thread

_BEFORE_OTHERS = 50  # TensorFlow's own conversion has 100, and lower priorities are tried first.


def install() -> None:
    """Wraps the functions that add slices to variables or convert slices to dense tensors."""
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
    # Outside of updates, as in a backward pass, the slices belong to one replica only. Their order
    # then cannot make the replicas differ.
    of_all = this_thread.adds_slices_in_order or (are_summed() and _order_matters())
    if not of_all or slices.dense_shape is None or dtype not in (None, slices.dtype):
        return NotImplemented
    added = add_repeated(slices)
    return tf.math.unsorted_segment_sum(added.values, added.indices, added.dense_shape[0], name)


def _order_matters() -> bool:
    return has_replicas(tf.distribute.get_strategy()) and adds_in_any_order()


def adds_in_any_order() -> bool:
    """Whether there are GPUs, which add slices with the same index in any order."""
    return bool(tf.config.list_logical_devices("GPU"))


def add_repeated(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Adds up the slices that have the same index, by a segmented scan.

    Source: Hillis and Steele, Data Parallel Algorithms, 1986.

    Args:
        slices: the slices, in any order. An index may occur several times.

    Returns:
        The same number of slices, sorted by their index, which is an int64. The first slice of each
        index contains the sum. The other slices of this index are zeros, so the order in which they
        are added does not matter.

    Example:
        >>> slices = tf.IndexedSlices(tf.constant([1.0, 2.0, 3.0]), tf.constant([5, 4, 5]))
        >>> sums = add_repeated(slices)
        >>> sums.indices.numpy().tolist(), sums.values.numpy().tolist()
        ([4, 5, 5], [2.0, 4.0, 0.0])
    """
    # TensorFlow would keep int32 tensors in host memory. With int64, the GPU computes the indices.
    indices = tf.cast(slices.indices, tf.int64)
    order = tf.argsort(indices, stable=True)
    indices, values = tf.gather(indices, order), tf.gather(slices.values, order)
    count = tf.size(indices, tf.int64)
    rows = tf.range(count)
    by_row = tf.concat([tf.shape(indices), tf.ones([tf.rank(values) - 1], tf.int32)], axis=0)

    def where(chosen: tf.Tensor, kept: tf.Tensor) -> tf.Tensor:
        return tf.where(tf.reshape(chosen, by_row), kept, tf.zeros_like(kept))

    def repeats(apart: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns, for each row, the row `apart` rows after it, and whether its index is equal."""
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
