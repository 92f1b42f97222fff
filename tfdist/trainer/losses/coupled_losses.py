"""Keras's losses that couple the rows of a batch, computed over the global batch.

Dice and Tversky over the whole batch are ratios of sums over rows, so only the sums are reduced.
Circle, which compares each row with all others, and losses normalized along the row axis need the
rows of all replicas; each replica then computes the loss over all rows and differentiates it with
respect to its own.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UnsupportedError
from tfdist.internals.keras import get_keras_mask, loss_function_of, set_keras_mask
from tfdist.strategies.step import Step, WholeBatch, replicated_step
from tfdist.trainer import global_batch
from tfdist.trainer.patching import patch


def install() -> None:
    """Replaces how Keras computes losses that couple rows, inside a tfdist step."""
    patch("keras.losses.dice", _over_all_rows)
    patch("keras.losses.tversky", _over_all_rows)
    patch("Loss.__call__", _over_global_batch)


def _over_global_batch(call: Any) -> Any:
    def call_coupled(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        step = replicated_step()
        if step is None or isinstance(step, WholeBatch) or not _couples_rows(self, y_pred):
            return call(self, y_true, y_pred, sample_weight)
        return _global_loss(step, call, self, y_true, y_pred, sample_weight)

    return call_coupled


def _couples_rows(loss: Any, y_pred: Any) -> bool:
    function, settings = loss_function_of(loss)
    if not tf.is_tensor(y_pred) or function is None:
        return False
    if inspect.unwrap(function) is _CIRCLE:
        return True
    # The axes over which it reduces, if its settings name them.
    axis = settings.get("axis", None if _ratio_of(function) else ())
    return _is_over_rows(axis, y_pred.shape.rank)


def _is_over_rows(axis: Any, rank: int | None) -> bool:
    if axis is None:
        return True
    axes = axis if isinstance(axis, (tuple, list)) else (axis,)
    return any(a == 0 or a == -(rank or 0) for a in axes)


def _global_loss(
    step: Step,
    call: Callable[..., Any],
    loss: Any,
    y_true: Any,
    y_pred: Any,
    sample_weight: Any,
) -> Any:
    function, _ = loss_function_of(loss)
    mask = get_keras_mask(y_pred)
    if _ratio_of(function) is None:
        y_true, y_pred = global_batch.rows((y_true, y_pred))
    else:
        # A weighted ratio is the ratio over all rows, times the weights of all rows.
        loss, y_pred = copy.copy(loss), tf.identity(y_pred)
        loss.fn = functools.partial(_ratio, step, function)
    if mask is not None:
        set_keras_mask(y_pred, global_batch.rows(mask))
    if sample_weight is not None and tf.convert_to_tensor(sample_weight).shape.rank != 0:
        sample_weight = global_batch.rows(sample_weight)
    with WholeBatch(step.total):
        value = call(loss, y_true, y_pred, sample_weight)
    if value.shape.rank != 0:
        raise UnsupportedError(
            f"The loss {loss.name!r} couples the rows of a batch, so with several replicas it must "
            f"be reduced to a scalar. Received: reduction={loss.reduction!r}. Use "
            "reduction='sum_over_batch_size', 'sum' or 'mean_with_sample_weight'."
        )
    return value


def _over_all_rows(function: Any) -> Any:
    # For custom losses that call the function.
    def ratio_over_all_rows(y_true: Any, y_pred: Any, *args: Any, **settings: Any) -> Any:
        step = replicated_step()
        given = inspect.signature(function).bind(y_true, y_pred, *args, **settings).arguments
        y_pred = tf.convert_to_tensor(y_pred) if step is not None else y_pred
        if step is None or not _is_over_rows(given.get("axis"), y_pred.shape.rank):
            return function(y_true, y_pred, *args, **settings)
        settings = {k: v for k, v in given.items() if k not in ("y_true", "y_pred")}
        return _ratio(step, function, y_true, y_pred, **settings)

    return ratio_over_all_rows


def _ratio(step: Step, function: Any, y_true: Any, y_pred: Any, **settings: Any) -> Any:
    y_pred = tf.convert_to_tensor(y_pred)
    with step:
        return _ratio_of(function)(tf.cast(y_true, y_pred.dtype), y_pred, **settings)


def _ratio_of(function: Any) -> Any:
    function = inspect.unwrap(function)
    return next((ratio for own, ratio in _RATIOS if own is function), None)


def _dice(y_true: tf.Tensor, y_pred: tf.Tensor, axis: Any = None) -> tf.Tensor:
    both, true, predicted = _totals([y_true * y_pred, y_true, y_pred], axis)
    return 1 - 2 * both / (true + predicted + keras.config.epsilon())


def _tversky(
    y_true: tf.Tensor, y_pred: tf.Tensor, alpha: float = 0.5, beta: float = 0.5, axis: Any = None
) -> tf.Tensor:
    both, first, second = _totals(
        [y_true * y_pred, (1 - y_pred) * y_true, y_pred * (1 - y_true)], axis
    )
    return 1 - both / (both + first * alpha + second * beta + keras.config.epsilon())


def _totals(values: list[tf.Tensor], axis: Any) -> Any:
    return global_batch.total([tf.reduce_sum(value, axis) for value in values])


_RATIOS = [
    (inspect.unwrap(keras.losses.dice), _dice),
    (inspect.unwrap(keras.losses.tversky), _tversky),
]
_CIRCLE = inspect.unwrap(keras.losses.circle)
