"""Losses on a replica's rows, scaled so that training matches a single process.

In a step of `fit` every loss is the mean over the replica's rows, and its gradient is weighted by
the replica's share of the rows (see `trainer/optimizers/replicated.py`): the sum over the replicas
is then the gradient over the global batch, however the rows are divided. Losses that are not means
over the rows are converted here: sums, means over unmasked entries or divided by sample weights,
and the losses that TensorFlow's guides divide by the global batch size.
"""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf

from tfdist.collective import traces
from tfdist.internals.keras import in_symbolic_scope, losses
from tfdist.strategies.step import Step, replicated_step
from tfdist.trainer.patching import patch


def install() -> None:
    """Replaces how Keras scales losses for replicas inside a tfdist step."""
    _install_scaling()
    _install_reduction()
    _install_guides()


def _install_scaling() -> None:
    scale, unscale = losses.scale_loss_for_distribution, losses.unscale_loss_for_distribution

    def scale_loss(value: Any) -> Any:
        if replicated_step() is not None:
            return value
        # Keras computes shapes in a graph that never runs.
        with traces.unnoted() if in_symbolic_scope() else contextlib.nullcontext():
            return scale(value)

    def unscale_loss(value: Any) -> Any:
        step = replicated_step()
        if step is not None:
            return _for_metric(step, tf.convert_to_tensor(value))
        with traces.unnoted() if in_symbolic_scope() else contextlib.nullcontext():
            return unscale(value)

    patch("losses.scale_loss_for_distribution", lambda _: scale_loss)
    patch("losses.unscale_loss_for_distribution", lambda _: unscale_loss)


def _for_metric(step: Step, value: tf.Tensor) -> tf.Tensor:
    """The value of a loss that a metric accumulates: zero on a replica without rows."""
    if value.shape.rank != 0:
        return step.scale_by_rows(value)  # Unreduced values were divided by the share.
    return tf.where(step.share > 0, value, tf.zeros_like(value))


def _install_reduction() -> None:
    apply_mask, reduce_values = losses.apply_mask, losses.reduce_values

    def mask_weights(sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
        weights = apply_mask(sample_weight, mask, dtype, reduction)
        step = replicated_step()
        if step is None or mask is None or reduction not in ("mean", "sum_over_batch_size"):
            return weights
        return weights * _mask_correction(step, mask, weights.dtype)

    def reduce_loss(
        values: Any, sample_weight: Any = None, reduction: str | None = "sum_over_batch_size"
    ) -> Any:
        step = replicated_step()
        if step is None or tuple(values.shape) == ():
            return reduce_values(values, sample_weight, reduction)
        if reduction in (None, "none"):
            return step.unscale_by_rows(values)
        if tuple(values.shape) == (0,):
            return tf.reduce_sum(values)
        if reduction == "sum":
            return step.unscale_by_rows(tf.reduce_sum(values))
        if reduction == "mean_with_sample_weight" and sample_weight is not None:
            return step.unscale_by_rows(_weighted_mean(step, values, sample_weight))
        return reduce_values(values, sample_weight, reduction)

    patch("losses.apply_mask", lambda _: mask_weights)
    patch("losses.reduce_values", lambda _: reduce_loss)


def _mask_correction(step: Step, mask: Any, dtype: Any) -> tf.Tensor:
    # Keras scales valid entries by total/valid of the local rows; this makes it the global ratio.
    total, valid = tf.cast(tf.size(mask), tf.float32), tf.reduce_sum(tf.cast(mask, tf.float32))
    all_total, all_valid = step.totals_of_mask(mask)
    correction = tf.math.divide_no_nan(all_total * valid, all_valid * total)
    return tf.cast(correction, dtype)


def _weighted_mean(step: Step, values: Any, sample_weight: Any) -> Any:
    (weight,) = step.totals([tf.reduce_sum(tf.cast(sample_weight, values.dtype))])
    return tf.math.divide_no_nan(tf.reduce_sum(values), weight)


def _install_guides() -> None:
    average, regularization = tf.nn.compute_average_loss, tf.nn.scale_regularization_loss

    def compute_average_loss(*args: Any, **kwargs: Any) -> Any:
        step = replicated_step()
        loss = average(*args, **kwargs)
        return loss if step is None else step.unscale_by_rows(loss)

    def scale_regularization_loss(regularization_loss: Any) -> Any:
        if replicated_step() is None:
            return regularization(regularization_loss)
        return tf.reduce_sum(regularization_loss)

    patch("tf.nn.compute_average_loss", lambda _: compute_average_loss)
    patch("tf.nn.scale_regularization_loss", lambda _: scale_regularization_loss)
