"""The optimizers with which a model trains: that of `compile`, and those of its own steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import keras

from tfdist.internals.keras import BaseOptimizer


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
