"""Checks that a model in training has all variables that belong to the training's state."""

from __future__ import annotations

import keras

from tfdist._src.keras.optimizers.of_model import optimizers_of
from tfdist.errors import UnsupportedError


def require_variables(model: keras.Model, callback: str) -> None:
    """Creates the optimizer's variables, and checks that the model has its own.

    Args:
        model: in training.
        callback: which callback needs them.

    Raises:
        UnsupportedError: the model, or an optimizer of its own training step, has none yet.
    """
    if not model.built:
        raise UnsupportedError(
            f"{callback} needs a model with variables. Received: {model.name!r}, which creates "
            "them in its first step. Call `model.build(shape)` before `fit`."
        )
    optimizer, trained = model.optimizer, model.trainable_variables
    if optimizer is not None and trained and not optimizer.built:
        with model.distribute_strategy.scope():
            optimizer.build(trained)
    for name, other in optimizers_of(model).items():
        if other is not optimizer and not other.built:
            raise UnsupportedError(
                f"{callback} needs optimizers that have their variables. Received: "
                f"{name.removeprefix('optimizer ')!r} of {model.name!r}, which creates them in its "
                "first step. Call its `build(variables)`, in the strategy's scope, before `fit`."
            )
