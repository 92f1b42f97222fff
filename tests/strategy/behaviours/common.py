"""Data, models and the outcome of a training, for all behaviours."""

from __future__ import annotations

import contextlib
import functools
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf


def scope(strategy: Any) -> Any:
    """The strategy's scope, or nothing for one process; seeded, so that both start alike."""
    keras.utils.set_random_seed(1)
    return strategy.scope() if strategy else contextlib.nullcontext()


def rows(count: int, features: int = 8, classes: int = 3, seed: int = 0) -> Any:
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(count, features)).astype("float32")
    return x, generator.integers(0, classes, count)


def mlp(features: int = 8, classes: int = 3) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((features,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(classes),
        ]
    )


def cross_entropy() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compile_mlp(strategy: Any, optimizer: Any = None, **settings: Any) -> keras.Model:
    with scope(strategy):
        model = mlp()
        settings.setdefault("metrics", ["accuracy"])
        model.compile(optimizer() if optimizer else "sgd", cross_entropy(), **settings)
    return model


def sgd_with_momentum() -> Any:
    """Inside it SGD has a momentum unless told otherwise: plain SGD keeps nothing to share out."""
    sgd = keras.optimizers.SGD
    remembering = functools.partialmethod(sgd.__init__, momentum=0.5)
    return mock.patch.object(sgd, "__init__", remembering)


def fit(model: keras.Model, *data: Any, **settings: Any) -> dict[str, list[float]]:
    settings = {"epochs": 2, "verbose": 0, **settings}
    return dict(model.fit(*data, **settings).history)


def outcome(model: keras.Model, history: Any = None, **more: Any) -> dict[str, Any]:
    return {"weights": model.get_weights(), "history": history, **more}


def batches(x: Any, y: Any, size: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(size)
