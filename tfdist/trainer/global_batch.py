"""Values over the global batch inside a step of `fit` or `evaluate`: totals, means and rows.

With TFDIST_STEP=replicated, the code of a step sees only its replica's rows. Code that couples rows
(a loss that is a ratio of sums, or compares each row with all others), clips gradients or tracks a
maximum can use these functions to access the global batch. The results are identical on all
replicas, and their gradients are correct: each replica differentiates its part, and the optimizer
sums the gradients.

In a single process, outside of steps, and in a step that is traced for the whole batch, the
functions return their arguments unchanged.

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
from tfdist.strategies.step import Step, current_step, in_global_step
from tfdist.trainer.optimizers.gradient_sync import in_replica

__all__ = ["mean", "rows", "total"]


def total(parts: Any) -> Any:
    """Computes sums over the global batch from each replica's sums.

    Args:
        parts: a nest of tensors of any shape, each a sum over the replica's rows.

    Returns:
        The same nest, with sums over the rows of the global batch.

    Raises:
        UnsupportedError: the other rows are unknown here: in a microbatch of a pipeline, or in a
            custom `strategy.run`.
    """
    return _sum_over_replicas(parts, lambda step, part: part)


def mean(values: Any) -> Any:
    """Computes means over the global batch, of gradients or a loss in a `train_step` for example.

    Args:
        values: a nest of tensors, each a mean over the replica's rows. Sparse gradients
            (`tf.IndexedSlices`) become dense; None stays None.

    Returns:
        The same nest, with means over the rows of the global batch.

    Raises:
        UnsupportedError: as for `total`.

    Example:
        >>> gradients = tape.gradient(loss, self.trainable_variables)
        >>> gradients = tfdist.global_batch.mean(gradients)
        >>> gradients = [tf.clip_by_norm(g, 1.0) for g in gradients]
        >>> self.optimizer.apply(gradients, self.trainable_variables)
    """
    return _sum_over_replicas(values, _scale_by_rows)


def rows(parts: Any) -> Any:
    """Gathers the rows of all replicas, in the order of the global batch.

    Args:
        parts: a nest of numeric tensors with the replica's rows as the first dimension.

    Returns:
        The same nest, with the rows of the global batch.

    Raises:
        UnsupportedError: as for `total`.
    """
    return _sum_over_replicas(parts, _padded_to_global_batch)


def _sum_over_replicas(parts: Any, contribution: Callable[[Step, tf.Tensor], tf.Tensor]) -> Any:
    step = _step()
    if step is None:
        return parts
    flat = tf.nest.flatten(parts)
    present = [i for i, part in enumerate(flat) if part is not None]
    contributions = [contribution(step, tf.convert_to_tensor(flat[i])) for i in present]
    for i, part, sum_ in zip(
        present, contributions, step.totals(contributions) if contributions else [], strict=True
    ):
        flat[i] = _with_gradient(step, sum_, part)
    return tf.nest.pack_sequence_as(parts, flat)


def _step() -> Step | None:
    if in_global_step():
        return None
    step = current_step()
    if step is None and in_replica():
        raise UnsupportedError(
            "tfdist.global_batch is available only in the steps of `fit`, `evaluate` and the like. "
            "Received: a call inside a custom `strategy.run`. Use "
            "`tf.distribute.get_replica_context().all_reduce` or `all_gather` there."
        )
    if step is not None and not step.knows_all_rows:
        raise UnsupportedError(
            "A pipeline cannot train with a loss that couples the rows of a batch, such as Dice, "
            "Tversky or Circle, as each microbatch is processed independently. Use data "
            "parallelism only, or a loss that is a mean over the rows."
        )
    return step


def _with_gradient(step: Step, value: tf.Tensor, own: tf.Tensor) -> tf.Tensor:
    # Cancels the scaling by rows that is applied when gradients are summed.
    if not value.dtype.is_floating:
        return value
    own = step.unscale_by_rows(own)
    return value + (own - tf.stop_gradient(own))


def _scale_by_rows(step: Step, value: tf.Tensor) -> tf.Tensor:
    return step.scale_by_rows(value if value.dtype.is_floating else tf.cast(value, tf.float32))


def _padded_to_global_batch(step: Step, part: tf.Tensor) -> tf.Tensor:
    part = part[: step.rows]  # A replica without rows computes with an added row.
    after = step.total - step.first_row - tf.shape(part)[0]
    around = [[step.first_row, after], *[[0, 0]] * (part.shape.rank - 1)]
    padded = tf.pad(part, around)
    padded.set_shape([None, *part.shape[1:]])
    return padded
