"""Every optimizer of `keras.optimizers`, with each of its options, on each kind of weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops
from keras import optimizers as o

from tests.enumeration.training import (
    ROWS,
    Program,
    Training,
    integers,
    numbers,
    public_classes,
    row_weights,
)

WORDS, POSITIONS, WIDTH = 6, 4, 3


class Signs(o.Optimizer):
    """A custom optimizer, as users write them: steps by the smoothed sign of a momentum."""

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.momentums = [self.add_variable_from_reference(v, "momentum") for v in variables]

    def update_step(self, gradient, variable, learning_rate):
        momentum = self.momentums[self._get_variable_index(variable)]
        gradient = tf.convert_to_tensor(gradient)  # Gradients of embeddings are sparse.
        momentum.assign(0.9 * momentum + 0.1 * gradient)
        step = ops.cast(learning_rate, variable.dtype) * ops.tanh(30 * momentum)
        variable.assign_sub(step)


# Learning rates that visibly change the tiny models; other optimizers use 0.02.
_RATES = {"SGD": 0.1, "Adadelta": 1.0, "Adagrad": 0.1, "Ftrl": 0.1, "Lion": 0.003}
_ARGUMENTS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.5, "nesterov": True}}
_SPECIAL = ("LossScaleOptimizer", "MultiOptimizer", "Optimizer", "OptimizerMap")


def create(name: str, **options: Any) -> o.Optimizer:
    """Creates an optimizer by the name of its class; for "Optimizer", a custom subclass."""
    if name == "MultiOptimizer":
        kernels, others = o.SGD(0.1), o.Adam(0.02, epsilon=1e-3)
        return o.MultiOptimizer(lambda v: kernels if "kernel" in v.path else others)
    cls = Signs if name == "Optimizer" else getattr(o, name)
    settings = {"learning_rate": _RATES.get(name, 0.02), **_ARGUMENTS.get(name, {}), **options}
    return cls(**settings)


def _schedule() -> Any:
    return o.schedules.ExponentialDecay(0.05, 2, 0.5)


def _scaled(optimizer: o.Optimizer) -> o.Optimizer:
    return o.LossScaleOptimizer(optimizer, initial_scale=64.0)


OPTIONS: dict[str, Callable[[str], o.Optimizer]] = {
    "plain": create,
    "clipnorm": lambda name: create(name, clipnorm=0.1),
    "global_clipnorm": lambda name: create(name, global_clipnorm=0.1),
    "clipvalue": lambda name: create(name, clipvalue=0.02),
    "ema": lambda name: create(name, use_ema=True, ema_momentum=0.6, ema_overwrite_frequency=3),
    "ema at the end": lambda name: create(name, use_ema=True, ema_momentum=0.6),
    "accumulation": lambda name: create(name, gradient_accumulation_steps=2),
    "scaled": lambda name: _scaled(create(name)),
    "scaled twice": lambda name: _scaled(_scaled(create(name))),
    "weight_decay": lambda name: create(name, weight_decay=0.05),
    "schedule": lambda name: create(name, learning_rate=_schedule()),
}


class Positions(layers.Layer):
    """Adds learned positions: rows of a table, looked up by constant indices."""

    def __init__(self, table: Any = None):
        super().__init__()
        self.table = table or layers.Embedding(POSITIONS, WIDTH)

    def call(self, x):
        return x + self.table(ops.arange(POSITIONS))


def _head(x: Any) -> Any:
    x = layers.Dense(4, activation="tanh")(x)
    return layers.Dense(2)(layers.Flatten()(x))


def _dense() -> keras.Model:
    inputs = keras.Input((POSITIONS, WIDTH))
    return keras.Model(inputs, _head(inputs))


def _rows() -> keras.Model:
    tokens = keras.Input((POSITIONS,), dtype="int32")
    return keras.Model(tokens, _head(layers.Embedding(WORDS, WIDTH)(tokens)))


def _positions() -> keras.Model:
    inputs = keras.Input((POSITIONS, WIDTH))
    return keras.Model(inputs, _head(Positions()(inputs)))


def _both() -> keras.Model:
    tokens = keras.Input((POSITIONS,), dtype="int32")
    table = layers.Embedding(WORDS, WIDTH)
    return keras.Model(tokens, _head(Positions(table)(table(tokens))))


WEIGHTS: dict[str, Callable[[], keras.Model]] = {
    "dense": _dense,
    "rows": _rows,
    "positions": _positions,
    "both": _both,
}


def _training(optimizer: Callable[[], o.Optimizer], weights: str, weighted: bool) -> Program:
    def data() -> tuple[Any, ...]:
        if weights in ("rows", "both"):
            x = integers(WORDS, ROWS, POSITIONS)
        else:
            x = numbers(ROWS, POSITIONS, WIDTH)
        return (x, numbers(ROWS, 2, seed=9), *([row_weights()] if weighted else []))

    return Training(
        WEIGHTS[weights],
        data,
        lambda: {"optimizer": optimizer(), "loss": "mse"},
        fit={"epochs": 3},
        steps=("evaluate",),
    )


def _programs() -> dict[str, Program]:
    plain = sorted(set(public_classes(o, o.Optimizer)) - set(_SPECIAL))
    programs: dict[str, Program] = {}
    cases = [
        *itertools.product([*plain, "Optimizer"], OPTIONS, WEIGHTS),
        *itertools.product(["MultiOptimizer"], ["plain", "scaled", "scaled twice"], WEIGHTS),
    ]
    for i, (name, option, weights) in enumerate(cases):
        programs[f"{name}/{option}/{weights}"] = _training(
            lambda name=name, option=option: OPTIONS[option](name), weights, i % 3 == 2
        )
    return programs


PROGRAMS = _programs()

# Each optimizer with each option and each kind of weights.
COVERING = [
    f"{name}/{option}/{list(WEIGHTS)[(i + j) % len(WEIGHTS)]}"
    for i, name in enumerate(dict.fromkeys(program.partition("/")[0] for program in PROGRAMS))
    for j, option in enumerate(OPTIONS)
    if f"{name}/{option}/dense" in PROGRAMS
]

DEFAULT = ["Adam/plain/positions"]


def missing() -> set[str]:
    """The public optimizers without a program."""
    known = {name.partition("/")[0] for name in PROGRAMS}
    scaled = {"LossScaleOptimizer"} if any("/scaled/" in name for name in PROGRAMS) else set()
    return set(public_classes(o, o.Optimizer)) - known - scaled
