"""Every loss of `keras.losses`, with each reduction, in each place where programs call losses."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from tests.enumeration.training import (
    BATCH,
    ROWS,
    Program,
    Training,
    fractions,
    integers,
    numbers,
    public_classes,
    public_functions,
    row_weights,
)
from tests.strategy.behaviours.common import outcome, scope

CLASSES = 3
# Losses that are one number for a batch, even without a reduction.
_OF_THE_BATCH = ("Circle", "circle", "Dice", "dice", "Tversky", "tversky")
REDUCTIONS = ("sum_over_batch_size", "sum", "none", "mean_with_sample_weight")
_OF_INTEGERS = (
    "SparseCategoricalCrossentropy",
    "sparse_categorical_crossentropy",
    "CategoricalGeneralizedCrossEntropy",
    "categorical_generalized_cross_entropy",
    "Circle",
    "circle",
)


_GENERALIZED = keras.losses.categorical_generalized_cross_entropy


def _generalized(y_true, y_pred):
    return _GENERALIZED(y_true, y_pred, q=0.5)


class Loss(keras.losses.Loss):
    """A subclass, as users write them."""

    def call(self, y_true, y_pred):
        return ops.mean(ops.abs(y_true - y_pred) ** 1.5, axis=-1)


def _head(name: str, x: Any) -> Any:
    if name.lower() == "ctc":
        return keras.layers.Reshape((4, 5))(keras.layers.Dense(20)(x))
    if name.lower() == "circle":
        return keras.layers.UnitNormalization()(keras.layers.Dense(CLASSES)(x))
    return keras.layers.Dense(CLASSES, activation="softmax")(x)


def _targets(name: str) -> np.ndarray:
    if name.lower() == "ctc":
        return integers(5, ROWS, 2, low=1)
    return integers(CLASSES, ROWS) if name in _OF_INTEGERS else fractions(ROWS, CLASSES)


@dataclasses.dataclass(frozen=True)
class Use:
    """The use of a loss in a place of a program.

    Args:
        name: the name of a class or a function in `keras.losses`.
        reduction: the reduction; None for a function, which has none.
        way: the place, a key of `WAYS`.
        weighted: whether the rows have weights.
    """

    name: str
    reduction: str | None
    way: str
    weighted: bool

    def __str__(self) -> str:
        parts = [self.name, self.reduction, self.way, "weighted" if self.weighted else None]
        return "/".join(part for part in parts if part)

    def __call__(self, strategy: Any) -> dict[str, Any]:
        return WAYS[self.way](self)(strategy)

    def loss(self) -> Any:
        """Returns the loss as an argument of `compile`."""
        if self.reduction is None:
            function = getattr(keras.losses, self.name)
            return _generalized if function is _GENERALIZED else function
        create = Loss if self.name == "Loss" else getattr(keras.losses, self.name)
        return create(reduction=self.reduction)

    def value(self) -> Callable[..., Any]:
        """Returns a function of targets, predictions and weights that computes the loss.

        It returns one number, or one per row.
        """
        loss = self.loss()
        if self.reduction is not None:
            return lambda y, p, w=None: loss(y, p, sample_weight=w)
        return lambda y, p, w=None: loss(y, p) if w is None else loss(y, p) * w

    def model(self, create: Callable[..., keras.Model] = keras.Model) -> keras.Model:
        inputs = keras.Input((4,))
        return create(inputs, _head(self.name, inputs))

    def data(self) -> tuple[Any, ...]:
        x, y = numbers(ROWS, 4), _targets(self.name)
        return (x, y, row_weights()) if self.weighted else (x, y)


def _sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.01)


def _in_compile(use: Use) -> Program:
    return Training(
        use.model, use.data, lambda: {"optimizer": _sgd(), "loss": use.loss()}, steps=("evaluate",)
    )


def _in_add_loss(use: Use) -> Program:
    class Adding(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.value = use.value()

        def call(self, y, p, w=None):
            self.add_loss(self.value(y, p, w))
            return p

    def model() -> keras.Model:
        inputs = {"x": keras.Input((4,))}
        y = _targets(use.name)
        inputs["y"] = keras.Input(y.shape[1:], dtype=y.dtype.name)
        if use.weighted:
            inputs["w"] = keras.Input(())
        p = _head(use.name, inputs["x"])
        return keras.Model(inputs, Adding()(inputs["y"], p, inputs.get("w")))

    def data() -> tuple[Any, ...]:
        return (dict(zip("xyw", use.data(), strict=False)),)

    return Training(model, data, lambda: {"optimizer": _sgd()}, steps=("evaluate",))


def _in_a_function(use: Use) -> Program:
    def compiled() -> dict[str, Any]:
        value = use.value()

        def function(y_true, y_pred):
            return 0.7 * value(y_true, y_pred)

        return {"optimizer": _sgd(), "loss": function}

    return Training(use.model, use.data, compiled, steps=("evaluate",))


def _in_compute_loss(use: Use) -> Program:
    class Model(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return ops.mean(self.value(y, y_pred, sample_weight)) + 0.1 * ops.mean(y_pred**2)

    def model() -> keras.Model:
        created = use.model(Model)
        created.value = use.value()
        return created

    return Training(model, use.data, lambda: {"optimizer": _sgd()}, steps=("evaluate",))


class Stepping(keras.Model):
    """Computes its loss in steps of its own."""

    def _loss(self, data, training):
        x, y, w = keras.utils.unpack_x_y_sample_weight(data)
        return ops.mean(self.value(y, self(x, training=training), w))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self._loss(data, True)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result(), "last": loss}

    def test_step(self, data):
        loss = self._loss(data, False)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result(), "last": loss}

    @property
    def metrics(self):
        return [self.tracker]


def _stepping(use: Use) -> keras.Model:
    model = use.model(Stepping)
    model.value = use.value()
    model.tracker = keras.metrics.Mean(name="loss")
    return model


def _in_train_step(use: Use) -> Program:
    return Training(
        lambda: _stepping(use), use.data, lambda: {"optimizer": _sgd()}, steps=("evaluate",)
    )


def _as_metric(use: Use) -> Program:
    def compiled() -> dict[str, Any]:
        value = use.value()

        def measured(y_true, y_pred):
            return value(y_true, y_pred)

        def loss(y_true, y_pred):
            return ops.mean(ops.square(y_pred))

        kind = "weighted_metrics" if use.weighted else "metrics"
        return {"optimizer": _sgd(), "loss": loss, kind: [measured]}

    return Training(use.model, use.data, compiled, steps=("evaluate",))


def _in_evaluate(use: Use) -> Program:
    def program(strategy: Any) -> dict[str, Any]:
        results = {}
        with scope(strategy):
            built_in, stepping = use.model(), _stepping(use)
            built_in.compile(_sgd(), use.loss())
            stepping.compile(_sgd())
        names = ("x", "y", "sample_weight")
        arguments = dict(zip(names, use.data(), strict=False))
        for name, model in (("built in", built_in), ("by hand", stepping)):
            results[name] = model.evaluate(
                **arguments, batch_size=BATCH, verbose=0, return_dict=True
            )
        return outcome(built_in, results)

    return program


WAYS: dict[str, Callable[[Use], Program]] = {
    "compile": _in_compile,
    "add_loss": _in_add_loss,
    "function": _in_a_function,
    "compute_loss": _in_compute_loss,
    "train_step": _in_train_step,
    "metric": _as_metric,
    "evaluate": _in_evaluate,
}


def _uses() -> list[Use]:
    classes = list(public_classes(keras.losses, keras.losses.Loss))
    functions = list(public_functions(keras.losses))
    kinds = [*itertools.product(classes, REDUCTIONS), *((name, None) for name in functions)]
    places = itertools.product(WAYS, (False, True))
    return [
        Use(name, reduction, way, weighted)
        for (name, reduction), (way, weighted) in itertools.product(kinds, places)
        # Keras supports weights only for metrics with a value for each row.
        if not (weighted and way == "metric" and _is_one_number(name, reduction))
    ]


def _is_one_number(name: str, reduction: str | None) -> bool:
    return reduction not in ("none", None) or name in _OF_THE_BATCH


_USES = _uses()
PROGRAMS: dict[str, Program] = {str(use): use for use in _USES}


def _covering() -> list[str]:
    """Selects each loss in each place, with reductions and weights in rotation."""
    chosen = []
    names = list(dict.fromkeys(use.name for use in _USES))
    for i, name in enumerate(names):
        own = [use for use in _USES if use.name == name]
        reductions = list(dict.fromkeys(use.reduction for use in own))
        for j, way in enumerate(WAYS):
            reduction, weighted = reductions[(i + j) % len(reductions)], bool((i + j // 2) % 2)
            use = Use(name, reduction, way, weighted)
            chosen.append(str(use if use in own else dataclasses.replace(use, weighted=False)))
    return chosen


# A seventh of all uses.
COVERING = _covering()

DEFAULT = ["SparseCategoricalCrossentropy/none/train_step/weighted"]


def missing() -> set[str]:
    """The public losses without a program."""
    public = {*public_classes(keras.losses, keras.losses.Loss), *public_functions(keras.losses)}
    return public - {use.name for use in _USES}
