"""Values over the global batch inside a step of `fit` or `evaluate`: totals, means and rows.

With TFDIST_STEP=replicated, the code of a step sees only its replica's rows. Code that couples rows
(a loss that is a ratio of sums, or compares each row with all others), clips gradients or tracks a
maximum can use these functions to access the global batch. The results are identical on all
replicas, and their gradients are correct: each replica differentiates its part, and the optimizer
sums the gradients.

In a single process, outside of steps, and in a step that is traced for the whole batch, the
functions return their arguments unchanged.

In a custom `strategy.run`, TensorFlow's contract holds: the objective is the sum of the replicas'
losses. The functions have the gradient of this sum, so a loss that a replica computes from the rows
of all must count its own rows only.

Example:
    >>> def contrastive_loss(labels, embeddings):
    ...     labels, embeddings = tfdist.global_batch.rows((labels, embeddings))
    ...     return supervised_contrastive(labels, embeddings)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.strategies import reduction
from tfdist.strategies.step import Step, current_step, in_global_step
from tfdist.trainer.optimizers.gradient_sync import in_replica

__all__ = ["mean", "rows", "total"]


def total(parts: Any) -> Any:
    """Computes sums over the global batch from each replica's sums.

    Args:
        parts: a nest of tensors of any shape, each a sum over the replica's rows.

    Returns:
        The same nest, with sums over the rows of the global batch.
    """
    if _is_in_custom_loop():
        return _map(_total, parts)
    return _sum_over_replicas(parts, lambda step, part: part)


def mean(values: Any) -> Any:
    """Computes means over the global batch, of gradients or a loss in a `train_step` for example.

    In a custom `strategy.run`, all replicas have the same weight, since their rows are unknown.

    Args:
        values: a nest of tensors, each a mean over the replica's rows. Sparse gradients
            (`tf.IndexedSlices`) become dense; None stays None.

    Returns:
        The same nest, with means over the rows of the global batch.

    Example:
        >>> gradients = tape.gradient(loss, self.trainable_variables)
        >>> gradients = tfdist.global_batch.mean(gradients)
        >>> gradients = [tf.clip_by_norm(g, 1.0) for g in gradients]
        >>> self.optimizer.apply(gradients, self.trainable_variables)
    """
    if _is_in_custom_loop():
        return _map(_mean, values)
    return _sum_over_replicas(values, _scale_by_rows)


def rows(parts: Any) -> Any:
    """Gathers the rows of all replicas, in the order of the global batch.

    Args:
        parts: a nest of numeric tensors with the replica's rows as the first dimension.

    Returns:
        The same nest, with the rows of the global batch.
    """
    if _is_in_custom_loop():
        return _map(_rows, parts)
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
    return None if in_global_step() else current_step()


def _is_in_custom_loop() -> bool:
    return current_step() is None and in_replica() and _extended().replica_count > 1


def _extended() -> Any:
    return tf.distribute.get_strategy().extended


def _map(function: Callable[[tf.Tensor], tf.Tensor], parts: Any) -> Any:
    return tf.nest.map_structure(
        lambda part: None if part is None else function(tf.convert_to_tensor(part)), parts
    )


@tf.custom_gradient  # type: ignore[untyped-decorator]
def _total(part: tf.Tensor) -> Any:
    return reduction.sum_over_replicas(part), reduction.sum_over_replicas


def _mean(part: tf.Tensor) -> tf.Tensor:
    part = part if part.dtype.is_floating else tf.cast(part, tf.float32)
    return _total(part) / tf.cast(_extended().replica_count, part.dtype)


@tf.custom_gradient  # type: ignore[untyped-decorator]
def _rows(part: tf.Tensor) -> Any:
    extended = _extended()
    own = tf.shape(part)[:1]
    counts = extended.gather_over_replicas(own)
    place, _ = extended.place_here()
    first = tf.reduce_sum(counts[:place])

    def gradient(of_all: tf.Tensor) -> tf.Tensor:
        # What the other replicas make of these rows counts, too.
        return reduction.sum_over_replicas(of_all)[first : first + own[0]]

    return extended.gather_over_replicas(part), gradient


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
