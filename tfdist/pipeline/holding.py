"""Which variables this process holds: those of its own stages, and no values of the others."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras

from tfdist.errors import UnsupportedError
from tfdist.internals.optimizer import is_overwritten
from tfdist.internals.variables import (
    deferred_variables,
    draw_value,
    give_value,
    has_value,
    take_value,
)
from tfdist.strategies.group import Group


def build(
    model: keras.Model | Callable[[], keras.Model],
) -> tuple[keras.Model, list[weakref.ref[Any]]]:
    """The model; and where a function makes it, the variables that it made, which have no values.

    Raises:
        ValueError: it is no model, nor a function that returns one.
        UnsupportedError: it has a `train_step` or the like of its own, or float8 layers.
    """
    made: list[weakref.ref[Any]] = []
    if not isinstance(model, keras.Model):
        if not callable(model):
            raise ValueError(
                "A PipelineModel is made of a Keras model, or of a function that returns one. "
                f"Received: {model!r}."
            )
        with deferred_variables() as waiting:
            model = model()
        made = [weakref.ref(variable) for variable in waiting]
        del waiting
    if not isinstance(model, keras.Model):
        raise ValueError(f"The function must return a Keras model. Received: {model!r}.")
    for method in ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics"):
        if getattr(type(model), method) is not getattr(keras.Model, method):
            raise UnsupportedError(
                f"A model in stages is trained by steps of its own. Received: "
                f"{type(model).__name__}, which has a `{method}` of its own. Express it by "
                "`compile` (losses and metrics), or by layers with `add_loss`."
            )
    recording = next((v.path for v in model.trainable_variables if is_overwritten(v)), None)
    if recording is not None:
        raise UnsupportedError(
            "A float8 layer records the largest numbers of a whole step, and a pipeline runs a "
            f"step in microbatches. Received: {recording!r}. Train the model without a pipeline, "
            "or with another dtype policy."
        )
    return model, made


def check_free(model: keras.Model, made: Iterable[weakref.ref[Any]], group: Group) -> None:
    """Checks that no other PipelineModel has taken values of a model; all ranks call it together.

    Args:
        model: the whole.
        made: as `build` gives it.
        group: all workers.

    Raises:
        UnsupportedError: on some worker there are values missing.
    """
    waiting = {id(reference()) for reference in made}
    gone = [v.path for v in model.variables if not has_value(v) and id(v) not in waiting]
    found = [path for path in group.exchange("model", gone[0] if gone else "") if path]
    if found:
        raise UnsupportedError(
            "The layers of a PipelineModel are no other model's as well, as no worker holds them "
            f"all. Received: {model.name!r}, with {found[0]!r}, whose value is gone. Make the "
            "layers anew, or load them from a file."
        )


def hold(variables: Sequence[Any], own: Iterable[Any], made: Iterable[weakref.ref[Any]]) -> None:
    """Gives a process's own variables their initial values, and takes those of all others.

    Args:
        variables: of the whole model.
        own: those of this process's stages.
        made: those without values, in the order in which one process would draw them; also what
            is no variable of the model, such as the state of a layer's metric.
    """
    mine, whole = {id(v) for v in own}, {id(v) for v in variables}
    for reference in made:
        variable = reference()
        if variable is None:
            continue
        if id(variable) in mine or id(variable) not in whole:
            give_value(variable)
        else:
            draw_value(variable)
    for variable in variables:
        if id(variable) in mine:
            give_value(variable)
        else:
            take_value(variable)
