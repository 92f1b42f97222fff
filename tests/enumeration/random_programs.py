"""Random programs: a seed determines the layers, loss, metrics, optimizer and data.

They compute with float64. Some weights have no gradient apart from rounding errors, such as a bias
before a normalization. Adam and similar optimizers scale these errors up to normal updates.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tests.enumeration import metrics, optimizers
from tests.enumeration.training import Program, double_precision, fractions, integers, numbers
from tests.strategy.behaviours.common import fit, outcome, scope

COUNT = 60


def _rms(y, p):
    return ops.sqrt(ops.mean(ops.square(y - p)) + 1e-6)


def _correlation(y, p):
    return -metrics.pearson(y, p)


def _masked(y, p):
    mask = ops.cast(y > -0.4, p.dtype)
    return ops.sum(ops.square(y - p) * mask) / (ops.sum(mask) + 1e-6)


def _contrast(y, p):
    similar = ops.matmul(p, ops.transpose(y))
    return -ops.mean(ops.diagonal(ops.log_softmax(similar)))


def _deviation(y, p):
    return ops.mean(ops.abs(y - p)) / (ops.std(y) + 0.1) + ops.max(ops.abs(p), axis=-1)


_LOSSES: tuple[Any, ...] = (
    "mse",
    "mae",
    "huber",
    "log_cosh",
    "cosine_similarity",
    _rms,
    _correlation,
    _masked,
    _contrast,
    _deviation,
    lambda: keras.losses.MeanSquaredError(reduction="sum"),
    lambda: keras.losses.LogCosh(reduction="mean_with_sample_weight"),
)
_METRICS: tuple[Any, ...] = (
    "mae",
    metrics.rmse,
    metrics.wape,
    metrics.median_error,
    metrics.MeanOfBatches,
    lambda: keras.metrics.RootMeanSquaredError(),
    lambda: keras.metrics.R2Score(),
    lambda: keras.metrics.CosineSimilarity(),
)
_OPTIMIZERS = ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adamax", "Lamb", "Nadam")
_OPTIONS = ("plain", "plain", *optimizers.OPTIONS)


class Centering(layers.Layer):
    """Subtracts the mean of the batch, and adds its square as a loss."""

    def call(self, x, training=False):
        mean = ops.mean(x, axis=0)
        self.add_loss(0.05 * ops.sum(ops.square(mean)))
        return x - mean if training else x


def _of_vectors(choice: random.Random) -> Any:
    width = choice.choice((3, 4, 6))
    return choice.choice(
        (
            lambda x: layers.Dense(width, activation="tanh")(x),
            lambda x: layers.Dense(width, kernel_regularizer="l2", activity_regularizer="l1")(x),
            lambda x: layers.BatchNormalization(momentum=0.7)(x),
            lambda x: layers.Dropout(0.3)(x),
            lambda x: layers.GaussianNoise(0.2)(x),
            lambda x: layers.LayerNormalization(epsilon=1e-2)(x),
            lambda x: Centering()(x),
            lambda x: layers.Add()([x, layers.Dense(x.shape[-1])(x)]),
            lambda x: layers.Lambda(lambda v: v / (1 + ops.max(ops.abs(v))))(x),
            lambda x: layers.SpectralNormalization(layers.Dense(width))(x),
            lambda x: layers.PReLU()(x),
        )
    )


def _of_sequences(choice: random.Random) -> Any:
    return choice.choice(
        (
            lambda x: layers.Conv1D(3, 2, padding="same", activation="relu")(x),
            lambda x: layers.GRU(3, return_sequences=True)(x),
            lambda x: layers.MultiHeadAttention(2, 2)(x, x),
            lambda x: layers.BatchNormalization(momentum=0.7)(x),
            lambda x: layers.SpatialDropout1D(0.3)(x),
            lambda x: x + layers.Embedding(x.shape[1], x.shape[2])(ops.arange(x.shape[1])),
            lambda x: layers.MaxPooling1D(2, padding="same")(x),
            lambda x: layers.TimeDistributed(layers.Dense(3))(x),
            lambda x: layers.GroupNormalization(1)(x),
        )
    )


def _model(choice: random.Random, kind: str) -> keras.Model:
    if kind == "vectors":
        inputs = keras.Input((4,))
        x = layers.Dense(4)(inputs)
    elif kind == "sequences":
        inputs = keras.Input((4, 3))
        x = inputs
    else:
        inputs = keras.Input((4,), dtype="int32")
        x = layers.Embedding(6, 3, mask_zero=choice.random() < 0.3)(inputs)
    if kind != "vectors":
        for _ in range(choice.randint(1, 3)):
            x = _of_sequences(choice)(x)
        ends = (layers.GlobalAveragePooling1D, layers.GlobalMaxPooling1D, layers.Flatten)
        x = choice.choice(ends)()(x)
    for _ in range(choice.randint(0, 2)):
        x = _of_vectors(choice)(x)
    return keras.Model(inputs, layers.Dense(3)(x))


def _created(choice: random.Random, options: tuple[Any, ...]) -> Any:
    chosen = choice.choice(options)
    creates = getattr(chosen, "__name__", "") == "<lambda>" or isinstance(chosen, type)
    return chosen() if creates else chosen


def program(seed: int) -> Program:
    """Returns the program of a seed."""

    def run(strategy: Any) -> dict[str, Any]:
        with double_precision():
            return train(strategy, random.Random(seed))

    def train(strategy: Any, choice: random.Random) -> dict[str, Any]:
        kind = choice.choice(("vectors", "sequences", "tokens"))
        rows, batch = choice.randint(5, 29), choice.randint(4, 13)
        if rows % batch == 1:
            rows += 1  # A batch of one row has no standard deviation.
        with scope(strategy):
            model = _model(choice, kind)
            optimizer = optimizers.OPTIONS[choice.choice(_OPTIONS)](choice.choice(_OPTIMIZERS))
            model.compile(
                optimizer,
                _created(choice, _LOSSES),
                metrics=[_created(choice, _METRICS)],
                steps_per_execution=choice.choice((1, 1, 2)),
                run_eagerly=choice.random() < 0.1,
            )
        shapes = {"vectors": (4,), "sequences": (4, 3)}
        x = integers(6, rows, 4) if kind == "tokens" else _doubles(numbers(rows, *shapes[kind]))
        y = _doubles(numbers(rows, 3, seed=1))
        arguments: dict[str, Any] = {"x": x, "y": y, "batch_size": batch}
        if choice.random() < 0.4:
            arguments["sample_weight"] = _doubles(fractions(rows, seed=2))
        shuffle = choice.random() < 0.3
        history = fit(model, **arguments, shuffle=shuffle)
        evaluated = model.evaluate(**arguments, verbose=0, return_dict=True)
        predicted = model.predict(x, batch_size=batch, verbose=0)
        return outcome(model, history, evaluated=evaluated, predicted=predicted)

    return run


def _doubles(values: np.ndarray) -> np.ndarray:
    return values.astype("float64")


class _BySeed(Mapping[str, Program]):
    """Maps every seed to its program; the tests run the seeds below `COUNT`."""

    def __getitem__(self, name: str) -> Program:
        return program(int(name))

    def __iter__(self) -> Iterator[str]:
        return map(str, range(COUNT))

    def __len__(self) -> int:
        return COUNT


PROGRAMS = _BySeed()

DEFAULT = ["0"]
