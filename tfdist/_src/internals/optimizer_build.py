"""Private APIs of Keras optimizers: building one again, for other variables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras

from tfdist._src.internals.keras import Variable

_MULTI = getattr(keras.optimizers, "MultiOptimizer", ())  # Not in the oldest Keras.


def is_multi(optimizer: Any) -> bool:
    """Whether an optimizer passes each variable on to another one."""
    return isinstance(optimizer, _MULTI)


def has_updated(optimizer: Any) -> bool:
    """Whether an optimizer has counted an update, also before it was restored."""
    return bool(int(optimizer._iterations.value) > 0)


def build_again(optimizer: Any, variables: Sequence[Any], unbuilt: Sequence[Any]) -> None:
    """Builds an optimizer once more, with new slots; its other variables keep their values.

    Args:
        optimizer: one that updates variables.
        variables: as for its `build`.
        unbuilt: the variables that it had before it was built.
    """
    with _made_anew(optimizer, unbuilt):
        optimizer.build(variables)


def build_multi_again(optimizer: Any, variables: Sequence[Any], unbuilt: Unbuilt) -> None:
    """Like `build_again`, for an optimizer that passes each variable on to another one.

    Args:
        optimizer: one for which `is_multi` holds.
        variables: as for its `build`.
        unbuilt: the state before it was built.
    """
    optimizer._inner_optimizers[:] = unbuilt.inner
    optimizer.built = False
    with contextlib.ExitStack() as made:
        for one, own in unbuilt.variables:
            made.enter_context(_made_anew(one, own))
        optimizer.build(list(variables))


@dataclass
class Unbuilt:
    """The state of an optimizer before it is built.

    Attributes:
        inner: the optimizers that it passes variables on to; it may find others as it is built.
        variables: the optimizers that are built with it, or itself, each with its variables.
    """

    inner: list[Any] = field(default_factory=list)
    variables: list[tuple[Any, list[Any]]] = field(default_factory=list)


@contextlib.contextmanager
def noting_unbuilt(optimizer: Any) -> Iterator[Unbuilt]:
    """Notes the state of an optimizer that is built inside."""
    if not is_multi(optimizer):
        yield Unbuilt(variables=[(optimizer, list(optimizer.variables))])
        return
    noted = Unbuilt(inner=list(optimizer.optimizers))
    choose = optimizer._optimizer_map

    def choose_noted(variable: Any) -> Any:
        one = choose(variable)
        if not one.built and all(one is not other for other, _ in noted.variables):
            noted.variables.append((one, list(one.variables)))
        return one

    vars(optimizer)["_optimizer_map"] = choose_noted  # Set without Keras's tracking.
    try:
        yield noted
    finally:
        vars(optimizer)["_optimizer_map"] = choose


@contextlib.contextmanager
def _made_anew(optimizer: Any, unbuilt: Sequence[Any]) -> Iterator[None]:
    """Unbuilds an optimizer, which may be built inside."""
    single = {name: v for name, v in vars(optimizer).items() if isinstance(v, Variable)}
    tracked, kept = ({id(v) for v in some} for some in (optimizer.variables, unbuilt))
    for variable in optimizer.variables:
        if id(variable) not in kept:
            optimizer._tracker.untrack(variable)
    optimizer._trainable_variables_indices.clear()
    optimizer.built = False
    yield
    for name, old in single.items():
        new = vars(optimizer)[name]
        if new is not old:
            new.assign(old)
            if id(old) not in tracked:  # as inside an optimizer that scales the loss
                optimizer._tracker.untrack(new)
