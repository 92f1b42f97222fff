"""Moving averages of weights under a sharded optimizer, and their uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist._src.internals.optimizer import averages_of, strategy_of
from tfdist._src.keras.patching import patch
from tfdist._src.sharding.shard import Shard
from tfdist._src.sharding.sharded import sharded_by


def install() -> None:
    """Replaces how Keras overwrites weights with averages; collective over all workers."""
    patch("TFOptimizer._overwrite_model_variables_with_average_value", _overwriting)
    patch("SwapEMAWeights._tf_swap_variables", _swapping)
    patch("SwapEMAWeights._tf_finalize_ema_values", _taking)


def _overwriting(overwrite: Callable[..., Any]) -> Callable[..., Any]:
    def overwrite_all(self: Any, trainable_variables: Any) -> Any:
        if sharded_by(self) is None or all(isinstance(v, Shard) for v in trainable_variables):
            return overwrite(self, trainable_variables)
        _publish(self, averages_of(self))
        return None

    return overwrite_all


def _swapping(swap: Callable[..., Any]) -> Callable[..., Any]:
    def swap_shards(self: Any, optimizer: Any) -> None:
        if sharded_by(optimizer) is None:
            swap(self, optimizer)
        else:
            _swap(optimizer)

    return swap_shards


def _taking(take: Callable[..., Any]) -> Callable[..., Any]:
    def take_shards(self: Any, optimizer: Any) -> None:
        if sharded_by(optimizer) is None:
            take(self, optimizer)
        else:
            _take(optimizer)

    return take_shards


def _swap(optimizer: Any) -> None:
    before = [tf.identity(average) for average in averages_of(optimizer)]
    _take(optimizer)
    _publish(optimizer, before)


def _take(optimizer: Any) -> None:
    sharded = sharded_by(optimizer)
    assert sharded is not None
    averages = averages_of(optimizer)
    for shard, average in zip(sharded.shards, averages, strict=True):
        average.assign(shard.of(shard.variable))


def _publish(optimizer: Any, values: Any) -> None:
    sharded = sharded_by(optimizer)
    assert sharded is not None
    workers = strategy_of(optimizer).extended.workers
    sharded.publish(values, communicator=workers)
