"""Losses that sum over the replicas to the loss of the global batch.

Keras divides each replica's mean loss by the number of replicas, which is right only where all
have equally many rows. Here a mean loss is weighted by the replica's share of the rows, and what
a mask or sample weights divide by is counted over the global batch.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.internals.keras import losses
from tfdist.strategies.step import Step, current_step


def install() -> None:
    """Replaces Keras's scaling of losses for replicas inside a tfdist step."""
    scale, unscale = losses.scale_loss_for_distribution, losses.unscale_loss_for_distribution
    apply_mask, reduce_values = losses.apply_mask, losses.reduce_values

    def scale_loss(value: Any) -> Any:
        step = current_step()
        if step is None:
            return scale(value)
        return step.weigh(tf.convert_to_tensor(value))

    def unscale_loss(value: Any) -> Any:
        step = current_step()
        if step is None:
            return unscale(value)
        return step.unweigh(tf.convert_to_tensor(value))

    def mask_weights(sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
        weights = apply_mask(sample_weight, mask, dtype, reduction)
        step = current_step()
        if step is None or mask is None or reduction not in ("mean", "sum_over_batch_size"):
            return weights
        return weights * _mask_correction(mask, weights.dtype)

    def reduce_loss(
        values: Any, sample_weight: Any = None, reduction: str = "sum_over_batch_size"
    ) -> Any:
        step = current_step()
        if step is None or reduction != "mean_with_sample_weight" or sample_weight is None:
            return reduce_values(values, sample_weight, reduction)
        return _weighted_mean(step, values, sample_weight)

    losses.scale_loss_for_distribution = scale_loss
    losses.unscale_loss_for_distribution = unscale_loss
    losses.apply_mask = mask_weights
    losses.reduce_values = reduce_loss


def _mask_correction(mask: Any, dtype: Any) -> tf.Tensor:
    # Keras weighs valid entries by total/valid of the local rows; this makes it the global ratio.
    local = [tf.cast(tf.size(mask), tf.float32), tf.reduce_sum(tf.cast(mask, tf.float32))]
    total, valid = local
    all_total, all_valid = _sums(local)
    correction = tf.math.divide_no_nan(all_total * valid, all_valid * total)
    return tf.cast(correction, dtype)


def _weighted_mean(step: Step, values: Any, sample_weight: Any) -> Any:
    (weight,) = _sums([tf.reduce_sum(tf.cast(sample_weight, values.dtype))])
    return tf.math.divide_no_nan(tf.reduce_sum(values), weight)


def _sums(values: list[tf.Tensor]) -> Any:
    context = tf.distribute.get_replica_context()
    stopped = [tf.stop_gradient(v) for v in values]
    return context.all_reduce(tf.distribute.ReduceOp.SUM, stopped)
