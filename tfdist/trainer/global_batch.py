"""Values of the whole global batch inside a step of `fit` or `evaluate`: totals, means and rows.

With several replicas a step's code sees the rows of its replica. What couples rows (a loss that is
a ratio of sums, or compares each row with all others), clips gradients or keeps a maximum takes
what it needs of the global batch from here. The results are the same on all replicas, and their
gradients are right: each replica differentiates its own part, and the optimizer adds up.

In one process, and outside of steps, the functions return what they are given.

Example:
    >>> def contrastive_loss(labels, embeddings):
    ...     labels, embeddings = tfdist.global_batch.rows((labels, embeddings))
    ...     return supervised_contrastive(labels, embeddings)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.errors import UnsupportedError
from tfdist.strategies.step import Step, current_step
from tfdist.trainer.optimizers.gradient_sync import in_replica

__all__ = ["mean", "rows", "total"]


def total(parts: Any) -> Any:
    """Adds up a sum over rows.

    Args:
        parts: a nest of tensors of any shape, each a sum over the replica's rows.

    Returns:
        The same nest, of sums over the rows of the global batch.

    Raises:
        UnsupportedError: the other rows are not known here: in a microbatch of a pipeline, or in a
            `strategy.run` of your own.
    """
    return _of_all(parts, lambda step, part: part)


def mean(values: Any) -> Any:
    """Averages what is a mean over rows, such as a gradient or a loss in a `train_step`.

    Args:
        values: a nest of tensors, each a mean over the replica's rows. Sparse gradients
            (`tf.IndexedSlices`) become dense; None stays None.

    Returns:
        The same nest, of means over the rows of the global batch.

    Raises:
        UnsupportedError: as for `total`.

    Example:
        >>> gradients = tape.gradient(loss, self.trainable_variables)
        >>> gradients = tfdist.global_batch.mean(gradients)
        >>> gradients = [tf.clip_by_norm(g, 1.0) for g in gradients]
        >>> self.optimizer.apply(gradients, self.trainable_variables)
    """
    return _of_all(values, _weigh)


def rows(parts: Any) -> Any:
    """Gathers the rows of all replicas, in the order of the global batch.

    Args:
        parts: a nest of tensors of numbers whose first dimension is the replica's rows.

    Returns:
        The same nest, with the rows of the global batch.

    Raises:
        UnsupportedError: as for `total`.
    """
    return _of_all(parts, _among_all_rows)


def _of_all(parts: Any, contribution: Callable[[Step, tf.Tensor], tf.Tensor]) -> Any:
    step = _step()
    if step is None:
        return parts
    flat = tf.nest.flatten(parts)
    present = [i for i, part in enumerate(flat) if part is not None]
    own = [contribution(step, tf.convert_to_tensor(flat[i])) for i in present]
    for i, part, sum_ in zip(present, own, step.totals(own) if own else [], strict=True):
        flat[i] = _with_gradient(step, sum_, part)
    return tf.nest.pack_sequence_as(parts, flat)


def _step() -> Step | None:
    step = current_step()
    if step is None and in_replica():
        raise UnsupportedError(
            "tfdist.global_batch knows the rows of all replicas in the steps of `fit`, `evaluate` "
            "and their kin. Received: a call inside a `strategy.run` of your own. Use "
            "`tf.distribute.get_replica_context().all_reduce` or `all_gather` there."
        )
    if step is not None and not step.knows_all_rows:
        raise UnsupportedError(
            "A microbatch of a pipeline does not know the rows of the others, which a loss that "
            "couples the rows of a batch, such as Dice, Tversky or Circle, needs. Train with data "
            "parallelism alone, or use a loss that is a mean over the rows."
        )
    return step


def _with_gradient(step: Step, value: tf.Tensor, own: tf.Tensor) -> tf.Tensor:
    # Where gradients are summed they are weighted by the replica's share of the rows.
    if not value.dtype.is_floating:
        return value
    own = step.unscale_by_rows(own)
    return value + (own - tf.stop_gradient(own))


def _weigh(step: Step, value: tf.Tensor) -> tf.Tensor:
    return step.weigh(value if value.dtype.is_floating else tf.cast(value, tf.float32))


def _among_all_rows(step: Step, part: tf.Tensor) -> tf.Tensor:
    part = part[: step.rows]  # A replica without rows has computed with another.
    after = step.total - step.first_row - tf.shape(part)[0]
    around = [[step.first_row, after], *[[0, 0]] * (part.shape.rank - 1)]
    padded = tf.pad(part, around)
    padded.set_shape([None, *part.shape[1:]])
    return padded
