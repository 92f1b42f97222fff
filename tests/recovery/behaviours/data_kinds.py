"""Kinds of data that a training may be given, and of validation data."""

from __future__ import annotations

import os
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.strategy.behaviours.common import rows

SEED = "TESTS_SEED_OF_ORDER"
"""A variable of the environment, with which a worker shuffles in another order."""


def _slices(*values: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(values).shuffle(50, seed=5)


def _in_batches(x: Any, y: Any) -> Any:
    for start in range(0, len(x), 8):
        yield x[start : start + 8], y[start : start + 8]


def _from_generator(x: Any, y: Any) -> dict[str, Any]:
    specs = tf.TensorSpec([None, 8]), tf.TensorSpec([None], y.dtype)
    return {"x": tf.data.Dataset.from_generator(lambda: _in_batches(x, y), output_signature=specs)}


def _endless(x: Any, y: Any) -> Any:
    while True:
        yield from _in_batches(x, y)


class _Batches(keras.utils.PyDataset):
    def __init__(self, x: Any, y: Any) -> None:
        super().__init__(workers=2, max_queue_size=3)
        self._batches = list(_in_batches(x, y))

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Any:
        return self._batches[index]


class _Shuffling(_Batches):
    def __init__(self, x: Any, y: Any) -> None:
        super().__init__(x, y)
        self._order = np.random.default_rng(int(os.environ.get(SEED, 3)))

    def on_epoch_end(self) -> None:
        self._order.shuffle(self._batches)


def _sparse(x: tf.Tensor, y: tf.Tensor) -> Any:
    return tf.sparse.from_dense(x), y


def _parallel(x: Any, y: Any) -> tf.data.Dataset:
    return _slices(x, y).map(lambda x, y: (2 * x, y), tf.data.AUTOTUNE).batch(8)


DATA = {
    "dataset": lambda x, y: {"x": _slices(x, y).batch(8)},
    "prefetched": lambda x, y: {"x": _parallel(x, y).prefetch(tf.data.AUTOTUNE)},
    "cached": lambda x, y: {"x": _slices(x, y).cache().batch(8)},
    "weighted": lambda x, y: {"x": _slices(x, y, np.linspace(0, 2, len(x))).batch(8)},
    "sparse": lambda x, y: {"x": _slices(x, y).batch(8).map(_sparse)},
    "arrays": lambda x, y: {"x": x, "y": y, "batch_size": 8, "shuffle": False},
    "shuffled arrays": lambda x, y: {"x": x, "y": y, "batch_size": 8},
    "generator dataset": _from_generator,
    "generator": lambda x, y: {"x": _endless(x, y), "steps_per_epoch": 7},
    "PyDataset": lambda x, y: {"x": _Batches(x, y), "shuffle": False},
    "shuffling PyDataset": lambda x, y: {"x": _Shuffling(x, y)},
}


def _shuffled(**more: Any) -> dict[str, Any]:
    data = tf.data.Dataset.from_tensor_slices(rows(30, seed=1)).shuffle(30, seed=8)
    return {"validation_data": data.batch(8), **more}


def _split(data: dict[str, Any]) -> dict[str, Any]:
    """Both from one shuffled dataset, as which they are drawn anew in each epoch."""
    whole = tf.data.Dataset.from_tensor_slices(rows(80)).shuffle(80, seed=5)
    data["x"] = whole.skip(30).batch(8)
    return {"validation_data": whole.take(30).batch(8)}


VALIDATION = {
    "shuffled": lambda data: _shuffled(),
    "part": lambda data: _shuffled(validation_steps=3),
    "repeated part": lambda data: {
        "validation_data": _shuffled()["validation_data"].repeat(),
        "validation_steps": 3,
    },
    "split": _split,
}
