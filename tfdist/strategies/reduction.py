"""Reductions of dense and sparse values through a communicator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collective.communicator import Communicator
from tfdist.internals.tensorflow import DistributedValues


def key_of(reduce_op: Any, place: str) -> str:
    """What a reduction is known by on all workers: the way, and where the user calls it, if so.

    Args:
        reduce_op: `tf.distribute.ReduceOp.SUM` or `MEAN`, which is a sum that is then divided.
        place: in the user's program; "" where the call is not the user's own.
    """
    way = "mean" if reduce_op == tf.distribute.ReduceOp.MEAN else ""
    return " at ".join(filter(None, [way, place]))


def all_reduce(
    communicator: Communicator, reduce_op: Any, value: Any, replicas: int, place: str = ""
) -> Any:
    """Reduces a nest of tensors and `tf.IndexedSlices` over a group.

    Args:
        communicator: the group.
        reduce_op: `tf.distribute.ReduceOp.SUM` or `MEAN`.
        value: a nest of this participant's values.
        replicas: what a mean divides the sum by.
        place: as for `key_of`.

    Returns:
        The same nest of sums or means. A sum of `IndexedSlices` holds the slices of all
        participants, in rank order.
    """
    reduced = sum_up(communicator, tf.nest.flatten(value), key_of(reduce_op, place))
    if reduce_op == tf.distribute.ReduceOp.MEAN:
        reduced = [divide(v, replicas) for v in reduced]
    return tf.nest.pack_sequence_as(value, reduced)


def sum_up(communicator: Communicator, values: Sequence[Any], key: str = "") -> list[Any]:
    """The sums of tensors and `tf.IndexedSlices` over a group; see `all_reduce`."""
    dense = [tf.convert_to_tensor(v) for v in values if not _is_sparse(v)]
    sums = iter(communicator.all_reduce(dense, key) if dense else [])
    return [
        all_gather_slices(communicator, v, key) if _is_sparse(v) else next(sums) for v in values
    ]


def sum_over_replicas(value: Any) -> Any:
    """The sums of a nest of tensors and `tf.IndexedSlices` over all replicas, in each of them.

    They are not to be differentiated. Those of `tf.distribute.ReplicaContext.all_reduce` are,
    by a function that TensorFlow keeps for ever, and with it the graph of the step.
    """
    extended = tf.distribute.get_strategy().extended
    return extended.reduce_over_replicas(tf.distribute.ReduceOp.SUM, value)


def all_gather_slices(
    communicator: Communicator, slices: tf.IndexedSlices, key: str = ""
) -> tf.IndexedSlices:
    """The slices of all participants, in rank order."""
    return tf.IndexedSlices(
        values=communicator.all_gather(tf.convert_to_tensor(slices.values), key),
        indices=communicator.all_gather(tf.convert_to_tensor(slices.indices), key),
        dense_shape=slices.dense_shape,
    )


def all_gather(
    communicator: Communicator, tensor: tf.Tensor, axis: Any, place: str = ""
) -> tf.Tensor:
    """Concatenates along any axis, in rank order; the sizes along it may differ."""
    if communicator.size == 1:
        return tensor
    if isinstance(axis, int) and axis == 0:
        return communicator.all_gather(tensor, place)
    rank = tf.rank(tensor)
    axis = tf.where(axis < 0, axis + rank, axis)
    order = tf.concat([[axis], tf.range(axis), tf.range(axis + 1, rank)], axis=0)
    front = tf.ensure_shape(tf.transpose(tensor, order), [None] * tensor.shape.rank)
    gathered = communicator.all_gather(front, place)
    return tf.transpose(gathered, tf.math.invert_permutation(order))


def gather_rows(communicator: Communicator, parts: Sequence[Any]) -> Any:
    """The rows of this worker's parts, dense or ragged, and then those of the other workers."""
    local = parts[0] if len(parts) == 1 else tf.concat(parts, axis=0)
    if not isinstance(local, tf.RaggedTensor):
        return communicator.all_gather(local)
    return tf.RaggedTensor.from_nested_row_lengths(
        communicator.all_gather(local.flat_values),
        [communicator.all_gather(lengths) for lengths in local.nested_row_lengths()],
    )


def add_up_locally(value: Any, local_ops: Any) -> Any:
    """The sum of a value over this worker's replicas, or the value where it is plain.

    Args:
        value: of one replica or of each.
        local_ops: a `tf.distribute.CrossDeviceOps` that adds up; None to add here.
    """
    if not isinstance(value, DistributedValues):
        return to_tensor(value)
    values = [to_tensor(v) for v in value.values]
    if len(values) == 1:
        return values[0]
    if local_ops is not None:
        first = value.values[0].device
        reduced = local_ops.reduce(tf.distribute.ReduceOp.SUM, value, first)
        return reduced.values[0] if isinstance(reduced, DistributedValues) else reduced
    return add(values)


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
