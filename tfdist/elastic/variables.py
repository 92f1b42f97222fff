"""Checks that a model in training has all variables that belong to the training's state."""

from __future__ import annotations

import keras

from tfdist.errors import UnsupportedError


def require_variables(model: keras.Model, callback: str) -> None:
    """Creates the optimizer's variables, and checks that the model has its own.

    Args:
        model: in training.
        callback: which callback needs them.

    Raises:
        UnsupportedError: the model has no variables yet.
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
