"""How many rows of a batch this worker has, and which ones they are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist._src.comm.overlap import overlapping
from tfdist._src.keras.fit.step_exchange import TracedProgram, heard, rows_of_heard, step_exchange
from tfdist._src.strategy import reduction
from tfdist._src.strategy.step import OwnRows


def count_rows(batch: Any) -> tf.Tensor:
    """The number of rows of a batch: the first dimension of its first component."""
    for component in tf.nest.flatten(batch):
        if component is None or isinstance(component, tf.experimental.Optional):
            continue
        if isinstance(component, tf.RaggedTensor):
            return tf.cast(component.nrows(), tf.int32)
        if isinstance(component, tf.SparseTensor):
            return tf.cast(component.dense_shape[0], tf.int32)
        known = component.shape[0]
        return tf.shape(component)[0] if known is None else tf.constant(known, tf.int32)
    raise ValueError("A batch must contain at least one tensor. Received: an empty structure.")


def count_own_rows(strategy: tf.distribute.Strategy, batch: Any) -> tf.Tensor:
    """The rows of all local replicas, by the first component that has any; an int32 scalar.

    Args:
        strategy: the strategy that has distributed the batch.
        batch: a nest of tensors or of the local replicas' tensors; with a single replica, anything
            that a custom step accepts, which may have no rows.
    """
    for component in tf.nest.flatten(batch):
        parts = [v for v in strategy.experimental_local_results(component) if _has_rows(v)]
        if parts:
            return tf.add_n([count_rows(part) for part in parts])
    return tf.constant(0)


def exchange_rows(
    batch: Any,
    program: TracedProgram,
    *,
    shared: bool,
    awaited: bool = False,
    told: tf.Tensor | None = None,
) -> OwnRows:
    """Counts the rows of all replicas, which hold the batch's rows in order; called by each.

    Args:
        batch: the replica's rows.
        program: the program of the step.
        shared: whether the replicas have shares of one batch, of which each has all rows.
        awaited: whether the forward pass waits for the result; see `once_compared`.
        told: as for `StepExchange.in_graph`.
    """
    rows = _same_rows(batch)
    replica, replicas = tf.distribute.get_strategy().extended.place_here()
    own = tf.one_hot(replica, replicas, on_value=rows, off_value=0, dtype=tf.int32)
    own = tf.concat([own, step_exchange.in_graph(told), program.in_graph()], axis=0)
    # Otherwise the forward pass needs no number of rows.
    with contextlib.nullcontext() if awaited else overlapping():
        sums = reduction.sum_over_replicas(own, "rows")
    counts, ends = sums[:replicas], tf.cumsum(sums[:replicas])
    return OwnRows(
        rows=rows,
        counts=counts,
        total=ends[-1],
        first_row=ends[replica] - rows,
        some_are_empty=tf.reduce_any(tf.equal(counts, 0)),
        heard=heard(sums[replicas:], replicas, unlike_shares(counts, ends[-1]) if shared else 0),
    )


def once_compared(batch: Any, own: OwnRows) -> Any:
    """Returns a batch once it is known that all workers have shares of one batch.

    While a step is traced, this worker's batch tells it the number of rows, so it could fail on
    others in many ways. If the assertion fails, it does on all workers, before anything else is
    communicated: the group remains usable.

    Args:
        batch: the replica's rows.
        own: from `exchange_rows`.
    """
    same = tf.debugging.Assert(tf.equal(rows_of_heard(own.heard), 0), [_UNLIKE_SHARES])
    with tf.control_dependencies([same]):
        return tf.nest.map_structure(lambda v: v if v is None else tf.identity(v), batch)


def finds_unlike_shares(error: tf.errors.InvalidArgumentError) -> bool:
    """Whether an error is that of `once_compared`."""
    return _UNLIKE_SHARES in str(error)


_UNLIKE_SHARES = "The workers have shares of batches with different numbers of rows."


def unlike_shares(counts: tf.Tensor, total: tf.Tensor, devices: int = 1) -> tf.Tensor:
    """How many numbers of rows are not those of the shares of a batch, an int32 scalar.

    Args:
        counts: the rows of each replica, an int32 vector, or of as many successive ones together.
        total: their sum.
        devices: how many.
    """
    replicas = (counts.shape[0] or tf.size(counts)) * devices
    shares = total // replicas + tf.cast(tf.range(replicas) < total % replicas, tf.int32)
    if devices > 1:
        shares = tf.reduce_sum(tf.reshape(shares, [-1, devices]), axis=1)
    return tf.math.count_nonzero(counts - shares, dtype=tf.int32)


def _same_rows(batch: Any) -> tf.Tensor:
    """The number of rows of a batch, which all dense components must have."""
    rows = count_rows(batch)
    dense = [leaf for leaf in tf.nest.flatten(batch) if isinstance(leaf, tf.Tensor)]
    counts = [tf.shape(leaf)[0] for leaf in dense if leaf.shape.rank and leaf.shape[0] is None]
    if len(counts) < 2:
        return rows
    found = tf.stack(counts)
    same = tf.debugging.Assert(tf.reduce_all(tf.equal(found, rows)), [_UNLIKE_ROWS, found])
    with tf.control_dependencies([same]):
        return tf.identity(rows)


_UNLIKE_ROWS = (
    "The components of this batch have different numbers of rows, unlike those of the first one. "
    "Begin with a batch where they differ. A worker's rows of each:"
)


def gather_sparse(
    own: tf.SparseTensor, first_row: Any, total: Any, gather: Callable[[tf.Tensor], tf.Tensor]
) -> tf.SparseTensor:
    """The rows of all replicas, as the indices of the whole batch number them.

    Args:
        own: own rows.
        first_row: the number of the first of them in the whole batch.
        total: the number of rows of the whole batch.
        gather: gathers the rows of a dense tensor.
    """
    others = own.dense_shape[1:]
    shift = tf.concat([[tf.cast(first_row, tf.int64)], tf.zeros_like(others)], axis=0)
    shape = tf.concat([[tf.cast(total, tf.int64)], others], axis=0)
    return tf.SparseTensor(gather(own.indices + shift), gather(own.values), shape)


def _has_rows(component: Any) -> bool:
    # False also for a tensor of unknown rank, which may be a scalar.
    return bool(tf.TensorShape(getattr(component, "shape", ())).rank)
