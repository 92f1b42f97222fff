"""Files of models whose optimizer is shared out: they hold its whole state, as ever.

For saving, all workers put the state together on the chief. For loading, each reads the whole state
and keeps its share, whichever number of workers has saved it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.internals.variables import lend_value
from tfdist.sharding.full_state import WholeState, whole_variables
from tfdist.sharding.sharded import sharded_by
from tfdist.trainer.patching import patch


def install() -> None:
    """Replaces how optimizers take their state from files."""
    patch("BaseOptimizer.load_own_variables", _of_the_whole)
    patch("BaseOptimizer.set_weights", _of_the_whole)


def has_sharded_optimizer(model: Any) -> bool:
    """Whether workers hold parts of a model's optimizer."""
    return sharded_by(getattr(model, "optimizer", None)) is not None


@contextlib.contextmanager
def with_whole_optimizer(model: Any) -> Iterator[Any]:
    """The model with an optimizer that has all state, on the chief, while it lasts; None elsewhere.

    All workers call it.
    """
    optimizer, extended = model.optimizer, model.distribute_strategy.extended
    chief = extended.group.topology.is_chief
    state = WholeState(optimizer)
    with extended.group.naming_lost_workers():
        state.gather(extended.workers, keep=chief)
    if not chief:
        yield None
        return
    for variable, own in zip(state.blanks, state.variables, strict=True):
        lend_value(variable, tf.convert_to_tensor(own))
    # Past Keras's tracking, which would make it a part of the model.
    attributes = vars(model)
    attributes["optimizer"] = state.blank
    try:
        yield model
    finally:
        attributes["optimizer"] = optimizer


class _Whole:
    """An optimizer as files know it: its variables take whole values."""

    built = True

    def __init__(self, optimizer: Any) -> None:
        self.name = optimizer.name
        self.variables = self._variables = whole_variables(optimizer)

    def _var_key(self, variable: Any) -> str:
        return str(variable.name)


def _of_the_whole(take: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(take)
    def take_own(self: Any, values: Any) -> Any:
        return take(self if sharded_by(self) is None else _Whole(self), values)

    return take_own
