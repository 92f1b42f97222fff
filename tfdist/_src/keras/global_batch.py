"""Sums, means and rows of the global batch; public as `tfdist.global_batch`."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist._src.keras.optimizers.gradient_sync import in_replica
from tfdist._src.strategy.extended import ReplicatedExtended, extended_of
from tfdist._src.strategy.step import current_step

__all__ = ["mean", "rows", "total"]


def total(parts: Any) -> Any:
    """Computes sums over the global batch from each replica's sums.

    Args:
        parts: a nest of tensors of any shape, each a sum over the replica's rows.

    Returns:
        The same nest, with sums over the rows of the global batch.
    """
    return _map(_total, parts)


def mean(values: Any) -> Any:
    """Computes means over the replicas, for example of a loss that is logged.

    The mean gives all replicas the same weight, because this function does not know their numbers
    of rows.

    Args:
        values: a nest of tensors, each a mean over the replica's rows. `tf.IndexedSlices` become
            dense; None stays None.

    Returns:
        The same nest, with means over the replicas.

    Example:
        >>> def step(x, y):  # called by `strategy.run`
        ...     loss = tf.reduce_mean(tf.square(y - model(x)))
        ...     return tfdist.global_batch.mean(loss)
    """
    return _map(_mean, values)


def rows(parts: Any) -> Any:
    """Gathers the rows of all replicas, in the order of the global batch.

    Args:
        parts: a nest of numeric tensors with the replica's rows as the first dimension.

    Returns:
        The same nest, with the rows of the global batch.
    """
    return _map(_rows, parts)


def _is_in_custom_loop() -> bool:
    return current_step() is None and in_replica() and _extended().replica_count > 1


def _extended() -> ReplicatedExtended:
    return extended_of(tf.distribute.get_strategy())


def _map(function: Callable[[tf.Tensor], tf.Tensor], parts: Any) -> Any:
    if not _is_in_custom_loop():
        return parts
    return tf.nest.map_structure(
        lambda part: None if part is None else function(tf.convert_to_tensor(part)), parts
    )


@tf.custom_gradient  # type: ignore[untyped-decorator]
def _total(part: tf.Tensor) -> Any:
    # TensorFlow never releases this function, so the function must not hold a reference to the
    # strategy.
    return _sum(part), _sum


def _sum(part: tf.Tensor) -> Any:
    return _extended().sum_over_replicas(part)


def _mean(part: tf.Tensor) -> tf.Tensor:
    part = part if part.dtype.is_floating else tf.cast(part, tf.float32)
    return _total(part) / tf.cast(_extended().replica_count, part.dtype)


@tf.custom_gradient  # type: ignore[untyped-decorator]
def _rows(part: tf.Tensor) -> Any:
    extended = _extended()
    own = tf.shape(part)[:1]
    counts = extended.gather_over_replicas(own)

    def gradient(of_all: tf.Tensor) -> tf.Tensor:
        # Every replica may use this replica's rows, so the gradients of all replicas are summed.
        return extended.scatter_over_replicas(of_all, counts)[: own[0]]

    return extended.gather_over_replicas(part), gradient
