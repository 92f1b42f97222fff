"""Reductions of dense and sparse values through a communicator."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist._src.comm.communicator_interface import Alone, Communicator
from tfdist._src.internals.tensorflow import DistributedValues


def key_of(reduce_op: Any, call_site: str) -> str:
    """Returns a key that identifies a reduction on all workers, from its operation and call site.

    Args:
        reduce_op: `tf.distribute.ReduceOp.SUM`, or `MEAN` for a sum that is divided afterwards.
        call_site: the location in the user's code; "" for internal calls.
    """
    op = "mean" if reduce_op == tf.distribute.ReduceOp.MEAN else ""
    return " at ".join(filter(None, [op, call_site]))


def all_reduce(communicator: Communicator, reduce_op: Any, value: Any, call_site: str = "") -> Any:
    """Reduces a nest of tensors and `tf.IndexedSlices` over a group.

    Args:
        communicator: the communicator of the group.
        reduce_op: `tf.distribute.ReduceOp.SUM` or `MEAN`.
        value: a nest of this participant's values.
        call_site: as for `key_of`.

    Returns:
        A nest of the sums or means, with the structure of `value`. A sum of `IndexedSlices`
        contains the slices of all participants, in rank order.
    """
    reduced = sum_values(communicator, tf.nest.flatten(value), key_of(reduce_op, call_site))
    if reduce_op == tf.distribute.ReduceOp.MEAN:
        _, size = communicator.place()
        reduced = [divide(v, size) for v in reduced]
    return tf.nest.pack_sequence_as(value, reduced)


def sum_values(communicator: Communicator, values: Sequence[Any], key: str = "") -> list[Any]:
    """Sums tensors and `tf.IndexedSlices` over a group; see `all_reduce`."""
    dense = [tf.convert_to_tensor(v) for v in values if not _is_sparse(v)]
    sums = iter(communicator.all_reduce(dense, key) if dense else [])
    return [
        all_gather_slices(communicator, v, key) if _is_sparse(v) else next(sums) for v in values
    ]


def all_gather_slices(
    communicator: Communicator, slices: tf.IndexedSlices, key: str = ""
) -> tf.IndexedSlices:
    """Concatenates the slices of all participants, in rank order."""
    return tf.IndexedSlices(
        values=communicator.all_gather(tf.convert_to_tensor(slices.values), key),
        indices=communicator.all_gather(tf.convert_to_tensor(slices.indices), key),
        dense_shape=slices.dense_shape,
    )


def all_gather(
    communicator: Communicator, tensor: tf.Tensor, axis: Any, call_site: str = ""
) -> tf.Tensor:
    """Concatenates the participants' tensors in rank order; sizes along the axis may differ."""
    if isinstance(communicator, Alone):
        return tensor
    if isinstance(axis, int) and axis == 0:
        return communicator.all_gather(tensor, call_site)
    rank = tf.rank(tensor)
    axis = tf.where(axis < 0, axis + rank, axis)
    order = tf.concat([[axis], tf.range(axis), tf.range(axis + 1, rank)], axis=0)
    front = tf.ensure_shape(tf.transpose(tensor, order), [None] * tensor.shape.rank)
    gathered = communicator.all_gather(front, call_site)
    return tf.transpose(gathered, tf.math.invert_permutation(order))


def gather_rows(communicator: Communicator, parts: Sequence[Any]) -> Any:
    """Concatenates the parts of this worker, and then the rows of all workers.

    The parts may be dense or ragged tensors.
    """
    local = parts[0] if len(parts) == 1 else tf.concat(parts, axis=0)
    if not isinstance(local, tf.RaggedTensor):
        return communicator.all_gather(local)
    return tf.RaggedTensor.from_nested_row_lengths(
        communicator.all_gather(local.flat_values),
        [communicator.all_gather(lengths) for lengths in local.nested_row_lengths()],
    )


def scatter_rows(communicator: Communicator, value: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
    """Sums values with the rows of all participants, and returns each participant's own rows.

    Args:
        communicator: the communicator of the group.
        value: the rows of all participants, in rank order.
        counts: the number of rows of each participant, a vector.

    Returns:
        This participant's rows of the sum. A participant without rows gets one row of another
        participant.
    """
    rank, size = communicator.place()
    most = tf.reduce_max(counts)

    def of_one_size() -> tf.Tensor:
        # A shorter shard is padded with rows of the next shard.
        rows = (tf.cumsum(counts) - counts)[:, tf.newaxis] + tf.range(most)
        return tf.gather(value, tf.minimum(tf.reshape(rows, [-1]), tf.shape(value)[0] - 1))

    is_even = tf.equal(most * size, tf.shape(value)[0])
    padded = tf.cond(is_even, lambda: value, of_one_size)
    own = communicator.reduce_scatter(padded)[: tf.maximum(counts[rank], 1)]
    return tf.ensure_shape(own, [None, *value.shape[1:]])


def sum_locally(value: Any, local_ops: Any) -> Any:
    """Sums a per-replica value over this worker's replicas.

    Any other value is returned unchanged, as a tensor.

    Args:
        value: the value.
        local_ops: the `tf.distribute.CrossDeviceOps` to use; None to use `tf.add_n`.
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
    """Adds values of this process, which are all dense or all `tf.IndexedSlices`."""
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


def sum_plain(value: Any, replicas: int) -> Any:
    """Sums a value that is not per-replica over replicas, which is well-defined only for zero."""
    if not tf.is_tensor(value) and value == 0:
        return value
    raise ValueError(
        f"A value that is not per-replica cannot be summed over {replicas} replicas. "
        f"Received: {value!r}. Return it from `strategy.run`, or reduce it with MEAN."
    )


def to_tensor(value: Any) -> Any:
    """Converts a value or variable to a tensor; `tf.IndexedSlices` are left unchanged."""
    return value if _is_sparse(value) else tf.convert_to_tensor(value)


def divide(value: Any, count: Any) -> Any:
    """Divides a sum, dense or sparse, by a count; integers become float64, as with `/`."""
    if _is_sparse(value):
        return tf.IndexedSlices(divide(value.values, count), value.indices, value.dense_shape)
    return value / tf.cast(count, value.dtype)


def reduce_mirrored(reduce_op: tf.distribute.ReduceOp, value: Any, replicas: Any) -> Any:
    """Reduces a value that is equal in all replicas, without communication."""
    if reduce_op == tf.distribute.ReduceOp.MEAN:
        return value
    return tf.nest.map_structure(lambda v: v * tf.cast(replicas, v.dtype), value.values[0])


def _is_sparse(value: Any) -> bool:
    return isinstance(value, tf.IndexedSlices)
