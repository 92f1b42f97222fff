"""The optimizers with which a model trains: that of `compile`, and those of its own steps."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.internals.keras import BaseOptimizer


def optimizers_of(model: keras.Model) -> dict[str, Any]:
    """A model's optimizers by name.

    Args:
        model: compiled.

    Returns:
        `"optimizer"` for the one that was passed to `compile`, if any, then `"optimizer NAME"` for
        each other one that is an attribute of the model.

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
    for name, value in sorted(vars(model).items()):
        if isinstance(value, BaseOptimizer) and id(value) not in seen:
            seen.add(id(value))
            found[f"optimizer {name}"] = value
    return found
