"""The optimizers with which a model trains: that of `compile`, and those of its own steps.

And which variables of them and of the model all replicas have in common.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import keras

from tfdist._src.internals.keras import BaseOptimizer
from tfdist._src.internals.optimizer import accumulators, updating_optimizers
from tfdist._src.sharding.sharded import sharded_by


def optimizers_of(model: keras.Model) -> dict[str, Any]:
    """A model's optimizers by name.

    Args:
        model: compiled.

    Returns:
        `"optimizer"` for the one that was passed to `compile`, if any, then `"optimizer NAME"` for
        each other one that is an attribute of the model, or `"optimizer NAME/KEY"` for one in a
        list or dict.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("adam", "mse")
        >>> model.other = keras.optimizers.SGD()
        >>> list(optimizers_of(model))
        ['optimizer', 'optimizer other']
    """
    first = getattr(model, "optimizer", None)
    found = {} if first is None else {"optimizer": first}
    seen = {id(first)}
    for name, value in _named(sorted(vars(model).items())):
        if id(value) not in seen:
            seen.add(id(value))
            found[f"optimizer {name}"] = value
    return found


def _named(items: Iterable[tuple[Any, Any]], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in items:
        name = f"{prefix}{key}"
        if isinstance(value, BaseOptimizer):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from _named(enumerate(value), f"{name}/")
        elif isinstance(value, dict):
            yield from _named(value.items(), f"{name}/")


def replicated_variables(model: keras.Model) -> dict[str, Any]:
    """The weights of a model and the state of its optimizers, as far as they are replicated.

    Left out are accumulated gradients and the slots of a sharded optimizer, which differ between
    replicas.

    Returns:
        Keras variables by names that are the same on all workers.
    """
    found = {f"weight {i}": variable for i, variable in enumerate(model.weights)}
    for name, outermost in optimizers_of(model).items():
        for i, variable in enumerate(replicated_state(outermost)):
            found[f"{name} {i}"] = variable
    return found


def replicated_state(optimizer: Any) -> list[Any]:
    """The variables of an optimizer that all replicas have in common."""
    own = own_state(optimizer)
    return [v for v in optimizer.variables if id(v) not in own]


def own_state(optimizer: Any) -> set[int]:
    """The variables of which each replica has its own; the identities of Keras variables."""
    updating = updating_optimizers(optimizer)
    own = {id(v) for one in updating for v in accumulators(one)}
    sharded = [one for one in updating if sharded_by(one) is not None]
    return own | {id(v) for one in sharded for v in one.variables if v.shape.rank}
