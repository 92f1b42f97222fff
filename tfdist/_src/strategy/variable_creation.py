"""Creates variables under a strategy: on every replica, with the same value on all workers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist._src.comm.communicator_interface import Alone
from tfdist._src.internals.extended import devices_of
from tfdist._src.internals.tensorflow import (
    CheckpointInitialValue,
    DistributedValues,
    default_variable_creator,
    distribute_utils,
)
from tfdist._src.strategy.variables import VARIABLE_CLASSES
from tfdist.errors import RendezvousError

_local = threading.local()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Makes this thread create plain, local variables.

    One worker can then do work by itself inside the strategy's scope, such as saving a model,
    without waiting for the other workers.
    """
    outer, _local.alone = getattr(_local, "alone", False), True
    try:
        yield
    finally:
        _local.alone = outer


def is_alone() -> bool:
    """Whether this thread is in `alone`."""
    return getattr(_local, "alone", False)


def create_variable(
    extended: tf.distribute.StrategyExtended, next_creator: Any, kwargs: dict[str, Any]
) -> Any:
    """Creates a variable with a copy on each device and, on all workers, the chief's value.

    While a function is traced, the variable is lifted out of it, as with `tf.init_scope`, so that
    variables which a model builds in its first step persist.

    Args:
        extended: the engine of the variable's strategy.
        next_creator: creates a copy.
        kwargs: the arguments of `tf.Variable`.
    """
    if is_alone():
        return next_creator(**{**kwargs, "distribute_strategy": None})
    if tf.executing_eagerly():
        return _create_mirrored(extended, next_creator, kwargs)
    kwargs["initial_value"] = _without_graph(kwargs.get("initial_value"))
    if tf.is_symbolic_tensor(kwargs["initial_value"]):
        return _create_mirrored(extended, next_creator, kwargs)
    with tf.init_scope():
        return _create_mirrored(extended, default_variable_creator, kwargs)


def _without_graph(initial_value: Any) -> Any:
    """An initial value that does not depend on the graph it is part of, if it is constant there."""
    if not tf.is_symbolic_tensor(initial_value):
        return initial_value
    constant = tf.get_static_value(initial_value)
    return initial_value if constant is None else lambda: tf.constant(constant, initial_value.dtype)


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
                    # The trailing slash makes the name absolute.
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
    if isinstance(workers, Alone) or given is None:
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
            return tf.zeros_like(value)  # Only the chief's copy holds the sum so far.
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
            f"The variable {variable!r} was created inside `strategy.scope()`, but not on all "
            f"workers: {error} Create models and optimizers on all workers, or those of a single "
            "worker outside of the scope."
        ) from error
