"""Each replica's share of a batch's rows; the first replicas take one row more if need be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.strategies.replay import current_replay

# Autograph takes longer to convert such functions than TensorFlow to trace them.
_as_written = tf.autograph.experimental.do_not_convert


def split_batches(
    dataset: Any, place: Callable[[Any], tuple[Any, Any]], count: int, fixed: int | None
) -> Any:
    """Splits every batch for this worker's replicas.

    Batches are prefetched before they are split, so that an iterator follows a change of the group:
    a share of rows is usually a reference to a part of the batch.

    Args:
        dataset: yields global batches; the first axis of every component is the rows.
        place: for one of this worker's replicas, its number among all, and their number.
        count: the number of this worker's replicas.
        fixed: the number of all replicas if it does not change.

    Returns:
        A dataset with `count` elements per batch: the rows of each replica, in order.
    """

    def cut(own: Any, *batch: Any) -> Any:
        element = batch if isinstance(dataset.element_spec, tuple) else batch[0]
        return take_share(element, *place(own), fixed)

    batches, replay = dataset.prefetch(1), current_replay()
    if replay is not None:
        batches = replay.of(batches)
    if count == 1:
        return _not_ahead(batches.map(_as_written(lambda *batch: cut(0, *batch))))

    def cut_all(*batch: Any) -> Any:
        local = tf.data.Dataset.range(count, output_type=tf.int32)
        return local.map(_as_written(lambda own: cut(own, *batch)))

    return _not_ahead(batches.flat_map(_as_written(cut_all)))


def _not_ahead(dataset: Any) -> Any:
    """The dataset without the prefetch that TensorFlow would put at its end."""
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return dataset.with_options(options)


def take_share(batch: Any, replica: Any, replicas: Any, fixed: int | None) -> Any:
    """One replica's rows of every component of a batch.

    Args:
        batch: the batch.
        replica: the replica's number.
        replicas: the number of replicas.
        fixed: the same, if it does not change.
    """

    def take(component: Any) -> Any:
        if component is None or isinstance(component, tf.experimental.Optional):
            return component
        if isinstance(component, tf.SparseTensor):
            return _take_sparse(component, replica, replicas)
        rows = component.nrows() if isinstance(component, tf.RaggedTensor) else _rows(component)
        start, stop = share_of_rows(rows, replica, replicas)
        share = component[start:stop]
        if isinstance(component, tf.RaggedTensor):
            return share
        known = None if fixed is None else fixed_rows(component.shape[0], fixed)
        if known is None:
            return with_any_rows(share)
        share.set_shape([known, *component.shape[1:]])
        return share

    return tf.nest.map_structure(take, batch)


def share_of_rows(rows: Any, replica: Any, replicas: Any) -> tuple[Any, Any]:
    """The half-open range of rows of a replica; the first replicas take the excess.

    Example:
        >>> [share_of_rows(5, r, 3) for r in range(3)]
        [(0, 2), (2, 4), (4, 5)]
    """
    if isinstance(rows, int) and isinstance(replica, int):
        least, excess = rows // replicas, rows % replicas
        start = replica * least + min(replica, excess)
        return start, start + least + (replica < excess)
    replica, replicas = tf.cast(replica, rows.dtype), tf.cast(replicas, rows.dtype)
    least, excess = rows // replicas, rows % replicas
    start = replica * least + tf.minimum(replica, excess)
    return start, start + least + tf.cast(replica < excess, rows.dtype)


def fixed_rows(rows: int | None, replicas: int) -> int | None:
    """The static number of rows per replica; None if the model must not see it.

    A model sees only sizes that could also occur in one process, the same in all replicas. Much
    code treats None and one row as special cases.
    """
    if rows is None or rows % replicas or rows < 2 * replicas:
        return None
    return rows // replicas


def with_any_rows(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor with an unknown number of rows while a function is traced."""
    if not tf.is_symbolic_tensor(tensor) or not tensor.shape.rank or tensor.shape[0] is None:
        return tensor
    shape = [None, *tensor.shape[1:]]
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=shape)


def _rows(component: Any) -> Any:
    return tf.shape(component)[0]


def _take_sparse(component: tf.SparseTensor, replica: Any, replicas: Any) -> tf.SparseTensor:
    shape = component.dense_shape
    start, stop = share_of_rows(shape[0], replica, replicas)
    zeros = tf.zeros_like(shape[1:])
    return tf.sparse.slice(
        component,
        start=tf.concat([[start], zeros], axis=0),
        size=tf.concat([[stop - start], shape[1:]], axis=0),
    )
