"""Which variables this process holds: those of its own stages, and no values of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras

from tfdist.errors import UnsupportedError
from tfdist.internals.keras import deferred_variables, give_value, take_value


def build(model: keras.Model | Callable[[], keras.Model]) -> keras.Model:
    """The model; where a function makes it, its variables have no values yet.

    Raises:
        ValueError: it is no model, nor a function that returns one.
        UnsupportedError: it has a `train_step` or the like of its own.
    """
    if not isinstance(model, keras.Model):
        if not callable(model):
            raise ValueError(
                "A PipelineModel is made of a Keras model, or of a function that returns one. "
                f"Received: {model!r}."
            )
        with deferred_variables():
            model = model()
    if not isinstance(model, keras.Model):
        raise ValueError(f"The function must return a Keras model. Received: {model!r}.")
    for method in ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics"):
        if getattr(type(model), method) is not getattr(keras.Model, method):
            raise UnsupportedError(
                f"A model in stages is trained by steps of its own. Received: "
                f"{type(model).__name__}, which has a `{method}` of its own. Express it by "
                "`compile` (losses and metrics), or by layers with `add_loss`."
            )
    return model


def hold(variables: Iterable[Any], own: Iterable[Any]) -> None:
    """Gives a process's own variables their initial values, and takes those of all others.

    Args:
        variables: of the whole model.
        own: those of this process's stages.
    """
    mine = {id(v) for v in own}
    for variable in variables:
        if id(variable) in mine:
            give_value(variable)
        else:
            take_value(variable)
