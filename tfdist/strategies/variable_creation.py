"""How variables come into being under a strategy: on every replica, the same on all workers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.errors import RendezvousError
from tfdist.internals.extended import devices_of
from tfdist.internals.tensorflow import (
    CheckpointInitialValue,
    DistributedValues,
    default_variable_creator,
    distribute_utils,
)
from tfdist.strategies.variables import VARIABLE_CLASSES

_local = threading.local()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """While it lasts, what this thread does is this worker's own: its variables are plain ones.

    So nothing that one worker does by itself inside the strategy's scope, such as saving a model,
    waits for the others.
    """
    outer, _local.alone = getattr(_local, "alone", False), True
    try:
        yield
    finally:
        _local.alone = outer


def create_variable(
    extended: tf.distribute.StrategyExtended, next_creator: Any, kwargs: dict[str, Any]
) -> Any:
    """A variable with a copy on each device of this worker, and on all workers the chief's value.

    One that is made while a function is traced is made outside of it, as `tf.init_scope` does:
    what a model builds in its first step stays.

    Args:
        extended: the engine of the strategy whose variable it is.
        next_creator: makes a copy.
        kwargs: the arguments of `tf.Variable`.
    """
    if getattr(_local, "alone", False):
        return next_creator(**{**kwargs, "distribute_strategy": None})
    if tf.executing_eagerly() or not _can_be_lifted(kwargs.get("initial_value")):
        return _create_mirrored(extended, next_creator, kwargs)
    with tf.init_scope():
        return _create_mirrored(extended, default_variable_creator, kwargs)


def _can_be_lifted(initial_value: Any) -> bool:
    return callable(initial_value) or not tf.is_symbolic_tensor(initial_value)


def _create_mirrored(
    extended: tf.distribute.StrategyExtended, next_creator: Any, kwargs: dict[str, Any]
) -> Any:
    colocate_with = kwargs.pop("colocate_with", None)
    if isinstance(colocate_with, DistributedValues):
        devices = devices_of(colocate_with)
    elif isinstance(colocate_with, (tuple, list)):
        devices = tuple(colocate_with)
    elif colocate_with is None:
        devices = extended.worker_devices
    else:
        with tf.device(colocate_with.device):
            return next_creator(**kwargs)

    summed = (
        kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ
        and kwargs.get("aggregation") == tf.VariableAggregation.SUM
    )

    def create_copies(**kwargs: Any) -> list[Any]:
        copies: list[Any] = []
        for i, device in enumerate(devices):
            with tf.device(device):
                if copies:
                    first = copies[0]
                    copy = tf.zeros_like if summed else tf.identity
                    kwargs["initial_value"] = lambda first=first, copy=copy: copy(first.value())
                    # The slash at the end makes the name absolute.
                    kwargs["name"] = f"{first.name.split(':')[0]}/replica_{i}/"
                else:
                    kwargs["initial_value"] = _first_value(extended, summed, kwargs)
                copies.append(next_creator(**kwargs))
        return copies

    return distribute_utils.create_mirrored_variable(
        extended.strategy,
        create_copies,
        VARIABLE_CLASSES,
        distribute_utils.VARIABLE_POLICY_MAPPING,
        **kwargs,
    )


def _first_value(
    extended: tf.distribute.StrategyExtended, summed: bool, kwargs: dict[str, Any]
) -> Any:
    given = kwargs["initial_value"]
    workers = extended.workers
    if workers.size == 1 or given is None:
        return given
    name, dtype = kwargs.get("name") or "Variable", kwargs.get("dtype")

    def chiefs_value() -> tf.Tensor:
        value = given() if callable(given) else given
        if isinstance(value, CheckpointInitialValue):
            value = value.wrapped_value
        value = tf.convert_to_tensor(value, dtype=dtype)
        with _naming(name):
            extended.agree_on_variable(f"{name} {value.dtype.name}{value.shape}")
        if summed and workers.rank > 0:
            return tf.zeros_like(value)  # The chief's copy alone holds the sum so far.
        if summed or not value.shape.num_elements():
            return value
        return workers.broadcast(value)

    return chiefs_value


@contextlib.contextmanager
def _naming(variable: str) -> Iterator[None]:
    try:
        yield
    except RendezvousError as error:
        raise RendezvousError(
            f"The variable {variable!r} was made inside `strategy.scope()`, and not by all "
            f"workers: {error} Make models and optimizers on all workers, or those of one worker "
            "alone outside of the scope."
        ) from error
