"""A model of the zoo with batches for it, and what makes these."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

VOCABULARY = 24


@dataclasses.dataclass(frozen=True)
class Example:
    """A model, and what it learns from.

    Attributes:
        make: makes the model.
        inputs: makes the inputs for so many rows.
        targets: likewise.
        loss: what `compile` takes.
        masked: whether masks pass from layer to layer and matter.
        policy: the dtype policy under which it is made.
    """

    make: Callable[[], keras.Model]
    inputs: Callable[[np.random.Generator, int], Any]
    targets: Callable[[np.random.Generator, int], Any]
    loss: Any = "mse"
    masked: bool = False
    policy: str = "float32"

    def build(self) -> keras.Model:
        """The model, with the same initial weights each time."""
        before = keras.config.dtype_policy()
        keras.utils.set_random_seed(0)
        keras.config.set_dtype_policy(self.policy)
        try:
            return self.make()
        finally:
            keras.config.set_dtype_policy(before)

    def batch(self, rows: int, seed: int = 0) -> tuple[Any, Any]:
        """Inputs and targets."""
        numbers = np.random.default_rng(seed)
        return self.inputs(numbers, rows), self.targets(numbers, rows)


def numbers_of(*shape):
    """Makes float32 numbers of a shape, for so many rows."""
    return lambda rng, rows: rng.normal(size=(rows, *shape)).astype(np.float32)


def classes(count, *shape):
    """Makes integers below a bound."""
    return lambda rng, rows: rng.integers(0, count, (rows, *shape)).astype(np.int32)


def tokens(length):
    """Makes sequences of different lengths, filled up with zeros."""

    def make(rng, rows):
        ids = rng.integers(1, VOCABULARY, (rows, length)).astype(np.int32)
        lengths = rng.integers(length // 2, length + 1, (rows, 1))
        return np.where(np.arange(length) < lengths, ids, 0).astype(np.int32)

    return make


def several(**makers):
    """Makes a dict."""
    return lambda rng, rows: {name: make(rng, rows) for name, make in makers.items()}
