"""Moving averages of weights that are shared out among the workers, and where they are used."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.internals.keras import TensorFlowOptimizer
from tfdist.sharding.shard import Shard
from tfdist.sharding.sharded import sharded_by


def install() -> None:
    """Replaces where Keras puts averages in the place of weights; all workers go there together."""
    TensorFlowOptimizer._overwrite_model_variables_with_average_value = _overwriting(
        TensorFlowOptimizer._overwrite_model_variables_with_average_value
    )
    swap = keras.callbacks.SwapEMAWeights
    swap._tf_swap_variables = _replaced(swap._tf_swap_variables, _swap)
    swap._tf_finalize_ema_values = _replaced(swap._tf_finalize_ema_values, _take)


def _overwriting(overwrite: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(overwrite)
    def overwrite_all(self: Any, trainable_variables: Any) -> Any:
        if sharded_by(self) is None or all(isinstance(v, Shard) for v in trainable_variables):
            return overwrite(self, trainable_variables)
        _publish(self, self._model_variables_moving_average)
        return None

    return overwrite_all


def _replaced(method: Callable[..., Any], instead: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, optimizer: Any) -> Any:
        if sharded_by(optimizer) is None:
            return method(self, optimizer)
        instead(optimizer)
        return None

    return call


def _swap(optimizer: Any) -> None:
    before = [tf.identity(average) for average in optimizer._model_variables_moving_average]
    _take(optimizer)
    _publish(optimizer, before)


def _take(optimizer: Any) -> None:
    sharded = sharded_by(optimizer)
    assert sharded is not None
    averages = optimizer._model_variables_moving_average
    for shard, average in zip(sharded.shards, averages, strict=True):
        average.assign(shard.of(shard.variable))


def _publish(optimizer: Any, values: Any) -> None:
    sharded = sharded_by(optimizer)
    assert sharded is not None
    workers = optimizer._distribution_strategy.extended.workers
    sharded.publish(values, communicator=workers)
