"""Reductions of dense and sparse values through a communicator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collective.protocol import Communicator


def all_reduce(communicator: Communicator, reduce_op: Any, value: Any, replicas: int) -> Any:
    """Reduces a nest of tensors and `tf.IndexedSlices` over a group.

    Args:
        communicator: the group.
        reduce_op: `tf.distribute.ReduceOp.SUM` or `MEAN`.
        value: a nest of this participant's values.
        replicas: what a mean divides the sum by.

    Returns:
        The same nest of sums or means. A sum of `IndexedSlices` holds the slices of all
        participants, in rank order.
    """
    flat = tf.nest.flatten(value)
    dense = [tf.convert_to_tensor(v) for v in flat if not _is_sparse(v)]
    sums = iter(communicator.all_reduce(dense) if dense else [])
    reduced = [all_gather_slices(communicator, v) if _is_sparse(v) else next(sums) for v in flat]
    if reduce_op == tf.distribute.ReduceOp.MEAN:
        reduced = [divide(v, replicas) for v in reduced]
    return tf.nest.pack_sequence_as(value, reduced)


def sum_over_replicas(value: Any) -> Any:
    """The sums of a nest of tensors and `tf.IndexedSlices` over all replicas, in each of them.

    They are not to be differentiated. Those of `tf.distribute.ReplicaContext.all_reduce` are,
    by a function that TensorFlow keeps for ever, and with it the graph of the step.
    """
    extended = tf.distribute.get_strategy().extended
    return extended._replica_ctx_all_reduce(tf.distribute.ReduceOp.SUM, value)


def all_gather_slices(communicator: Communicator, slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """The slices of all participants, in rank order."""
    return tf.IndexedSlices(
        values=communicator.all_gather(tf.convert_to_tensor(slices.values)),
        indices=communicator.all_gather(tf.convert_to_tensor(slices.indices)),
        dense_shape=slices.dense_shape,
    )


def all_gather(communicator: Communicator, tensor: tf.Tensor, axis: Any) -> tf.Tensor:
    """Concatenates along any axis, in rank order; the sizes along it may differ."""
    if communicator.size == 1:
        return tensor
    if isinstance(axis, int) and axis == 0:
        return communicator.all_gather(tensor)
    rank = tf.rank(tensor)
    axis = tf.where(axis < 0, axis + rank, axis)
    order = tf.concat([[axis], tf.range(axis), tf.range(axis + 1, rank)], axis=0)
    front = tf.ensure_shape(tf.transpose(tensor, order), [None] * tensor.shape.rank)
    gathered = communicator.all_gather(front)
    return tf.transpose(gathered, tf.math.invert_permutation(order))


def add(values: Sequence[Any]) -> Any:
    """The sum of local values, dense or sparse."""
    if _is_sparse(values[0]):
        return tf.IndexedSlices(
            values=tf.concat([v.values for v in values], axis=0),
            indices=tf.concat([v.indices for v in values], axis=0),
            dense_shape=values[0].dense_shape,
        )
    if values[0].dtype.is_bool:
        raise ValueError(
            "Boolean values cannot be reduced over replicas. Received: a bool tensor. "
            "Cast it to an integer first."
        )
    return tf.add_n(values)


def multiply_plain(value: Any, replicas: int) -> Any:
    """The sum of one plain value over replicas that all hold it; only zero has an obvious one."""
    if not tf.is_tensor(value) and value == 0:
        return value
    raise ValueError(
        f"A value that is not per-replica cannot be summed over {replicas} replicas. "
        f"Received: {value!r}. Return it from `strategy.run`, or reduce it with MEAN."
    )


def to_tensor(value: Any) -> Any:
    """A tensor of a value or variable; `tf.IndexedSlices` stay as they are."""
    return value if _is_sparse(value) else tf.convert_to_tensor(value)


def divide(value: Any, count: int) -> Any:
    """A mean from a sum, dense or sparse; of integers in float64, as `/` does."""
    if _is_sparse(value):
        return tf.IndexedSlices(divide(value.values, count), value.indices, value.dense_shape)
    return value / tf.cast(count, value.dtype)


def reduce_mirrored(reduce_op: tf.distribute.ReduceOp, value: Any, replicas: int) -> Any:
    """Reduces a value that is the same in all replicas."""
    if reduce_op == tf.distribute.ReduceOp.MEAN:
        return value
    return tf.nest.map_structure(lambda v: v * replicas, value.values[0])


def _is_sparse(value: Any) -> bool:
    return isinstance(value, tf.IndexedSlices)
