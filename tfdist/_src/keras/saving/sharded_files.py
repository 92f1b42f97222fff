"""Files of models with a sharded optimizer: they always contain its full, unsharded state.

To save, all workers gather the state on the chief. To load, each worker reads the full state and
keeps its shard; the number of workers may differ from when it was saved.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist._src.internals.variables import set_value_on_cpu
from tfdist._src.keras.patching import patch
from tfdist._src.sharding import FullState, full_variables, sharded_by


def install() -> None:
    """Replaces how optimizers load their state from files."""
    patch("BaseOptimizer.load_own_variables", _loading_full_state)
    patch("BaseOptimizer.set_weights", _loading_full_state)


def has_sharded_optimizer(model: Any) -> bool:
    """Whether a model's optimizer is sharded."""
    return sharded_by(getattr(model, "optimizer", None)) is not None


@contextlib.contextmanager
def with_full_optimizer(model: Any) -> Iterator[Any]:
    """Yields the model with an optimizer that has the full state on the chief; None elsewhere.

    Collective over all workers.
    """
    optimizer, extended = model.optimizer, model.distribute_strategy.extended
    chief = extended.group.topology.is_chief
    state = FullState(optimizer)
    with extended.group.naming_lost_workers():
        state.gather(extended.workers, keep=chief)
    if not chief:
        yield None
        return
    for variable, own in zip(state.blanks, state.variables, strict=True):
        set_value_on_cpu(variable, tf.convert_to_tensor(own))
    # Set without Keras's tracking, which would add it to the model.
    attributes = vars(model)
    attributes["optimizer"] = state.blank
    try:
        yield model
    finally:
        attributes["optimizer"] = optimizer


class _LoadTarget:
    """Stands in for an optimizer when its state is loaded; its variables accept full values."""

    built = True

    def __init__(self, optimizer: Any) -> None:
        self.name = optimizer.name
        self.variables = self._variables = full_variables(optimizer)

    def _var_key(self, variable: Any) -> str:
        return str(variable.name)


def _loading_full_state(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def load_local(self: Any, values: Any) -> Any:
        return load(self if sharded_by(self) is None else _LoadTarget(self), values)

    return load_local
