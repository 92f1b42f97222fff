"""A program: a training whose losses, metrics, weights and predictions are compared."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.strategy.behaviours.common import fit, outcome, scope

Program = Callable[[Any], dict[str, Any]]

# A batch of eleven rows and one of seven: neither divides by two workers.
ROWS, BATCH = 18, 11


@dataclasses.dataclass(frozen=True)
class Training:
    """Fits, evaluates and predicts on two uneven batches.

    Args:
        model: creates the model, in the strategy's scope.
        data: creates x, y and possibly sample weights.
        compile: creates the arguments of `compile`, in the strategy's scope. Without them, the
            model has compiled itself.
        fit: arguments of `fit`.
        steps: the methods that are called after `fit`.
        double: whether the model computes with float64.
    """

    model: Callable[[], keras.Model]
    data: Callable[[], tuple[Any, ...]]
    compile: Callable[[], dict[str, Any]] | None = None
    fit: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    steps: tuple[str, ...] = ("evaluate", "predict")
    double: bool = False

    def __call__(self, strategy: Any) -> dict[str, Any]:
        with double_precision() if self.double else contextlib.nullcontext():
            return self._run(strategy)

    def _run(self, strategy: Any) -> dict[str, Any]:
        with scope(strategy):
            model = self.model()
            if self.compile:
                model.compile(**self.compile())
        data = self.data()
        names = ("x", "y", "sample_weight")
        arguments = dict(zip(names, data, strict=False))
        settings = {"batch_size": BATCH, "shuffle": False, **self.fit}
        result = outcome(model, fit(model, **arguments, **settings))
        if "evaluate" in self.steps:
            result["evaluated"] = model.evaluate(
                **arguments, batch_size=BATCH, verbose=0, return_dict=True
            )
        if "predict" in self.steps:
            result["predicted"] = model.predict(data[0], batch_size=BATCH, verbose=0)
        return result


def adam(rate: float = 0.02) -> keras.optimizers.Optimizer:
    """Adam whose updates do not depend on the sign of rounding errors."""
    return keras.optimizers.Adam(rate, epsilon=1e-3)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def fractions(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.05, 0.95, shape).astype("float32")


def integers(high: int, *shape: int, seed: int = 0, low: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, shape).astype("int32")


def row_weights(count: int = ROWS) -> np.ndarray:
    """A weight for each row, some of them zero."""
    weights = np.random.default_rng(5).uniform(0.2, 2.0, count).astype("float32")
    weights[3::7] = 0.0
    return weights


def public_classes(module: ModuleType, base: type) -> dict[str, type]:
    """The classes of a public module of Keras, each under its own name."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, base) and value.__name__ == name
    }


def public_functions(module: ModuleType) -> dict[str, Any]:
    """The functions of a public module of Keras that compute a loss or a metric."""
    tools = ("deserialize", "get", "serialize")
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and name not in tools
    }


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """Makes models compute with float64 within this context."""
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        yield
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


@contextlib.contextmanager
def shared_folder(strategy: Any) -> Iterator[pathlib.Path]:
    """Yields a new folder, the same on all workers; deletes it once all have left the context."""
    number = np.random.default_rng().integers(1 << 62)
    if strategy:
        number = int(tfdist.collective.broadcast(tf.constant(number)))
    folder = pathlib.Path(tempfile.gettempdir()) / f"programs-{number}"
    folder.mkdir(exist_ok=True)
    try:
        yield folder
    finally:
        wait(strategy)
        if tfdist.is_chief():
            shutil.rmtree(folder)


def wait(strategy: Any) -> None:
    """Waits until all workers have called it."""
    if strategy:
        tfdist.collective.barrier()
