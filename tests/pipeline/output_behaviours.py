"""Losses and metrics of the outputs of a whole batch, in stages and in one process."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, ops

import tfdist
from tfdist._src.internals.variables import has_value

# The last batch has one row, so one of two pipelines has none.
ROWS, BATCH, LENGTH, CLASSES = 17, 8, 5, 4


def run(strategy, name):
    """Trains and evaluates: the logs, and the variables that this process holds."""
    model, whole, data = _made(strategy, name)
    x, y, weights = data
    settings = {"sample_weight": weights, "batch_size": BATCH, "verbose": 0}
    history = model.fit(x, y, epochs=2, shuffle=False, **settings).history
    logs = model.evaluate(x, y, return_dict=True, **settings)
    held = {i: np.array(v) for i, v in enumerate(whole.variables) if has_value(v)}
    return {"history": history, "logs": logs, "own": held}


def _made(strategy, name):
    keras.utils.set_random_seed(0)
    example = EXAMPLES[name]
    build, weighted = example.model, example.weighted
    if strategy is None:
        model = whole = build()
        scope = contextlib.nullcontext
    else:
        strategy = tfdist.HybridStrategy(pipeline_size=2, microbatches=3, schedule=example.schedule)
        scope = strategy.scope
        with scope():
            cuts = ["first"] if strategy.stages == 2 else None
            model = tfdist.PipelineModel(build, cuts, balance="parameters")
        whole = model.partition.graph.model
    with scope():
        model.compile(
            keras.optimizers.SGD(0.1),
            example.loss(),
            metrics=example.metrics(),
            weighted_metrics=example.metrics() if weighted else None,
        )
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, size=(ROWS, LENGTH)).astype("int32")
    numbers = rng.normal(size=(ROWS, LENGTH, 3)).astype("float32")
    x = [tokens, numbers][: len(whole.inputs)]
    length = whole.outputs[0].shape[1]
    if len(whole.outputs[0].shape) == 2:
        y = rng.uniform(size=(ROWS, length)).astype("float32")
        weights = rng.random(ROWS).astype("float32") if weighted else None
        return model, whole, (x[0], y, weights)
    y = rng.integers(CLASSES, size=(ROWS, length))
    weights = rng.random((ROWS, length)).astype("float32") if weighted else None
    return model, whole, (x if len(x) > 1 else x[0], y, weights)


def _cross_entropy(**settings):
    settings = {"from_logits": True, **settings}
    return lambda: keras.losses.SparseCategoricalCrossentropy(**settings)


def _masked_and_not():
    """Words with a mask beside numbers without."""
    tokens, numbers = keras.Input((LENGTH,), dtype="int32"), keras.Input((LENGTH, 3))
    x = layers.Embedding(3, 4, mask_zero=True)(tokens)
    y = layers.Dense(6, activation="tanh", name="first")(numbers)
    both = layers.Dense(6, activation="tanh")(layers.Concatenate()([x, y]))
    return keras.Model([tokens, numbers], layers.Dense(CLASSES)(both))


def _encoder_decoder():
    """The source comes first, with its mask, and the target behind it has none."""
    source, target = keras.Input((LENGTH,), dtype="int32"), keras.Input((LENGTH, 3))
    x = layers.LSTM(4, return_sequences=True)(layers.Embedding(3, 4, mask_zero=True)(source))
    y = layers.Dense(4, activation="tanh", name="first")(target)
    both = layers.Concatenate(axis=1)([x, y])
    both = layers.Dense(CLASSES)(layers.LSTM(6, return_sequences=True)(both))
    return keras.Model([source, target], both)


def _tagger(mask_zero=False):
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Dense(6, activation="tanh", name="first")(
        layers.Embedding(3, 4, mask_zero=mask_zero)(tokens)
    )
    return keras.Model(tokens, layers.Dense(CLASSES)(x))


class _Masking(layers.Layer):
    def call(self, x):
        return x

    def compute_mask(self, x, previous=None):
        return ops.any(x > 0, axis=-1)


def _masked_by_itself():
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = _Masking()(layers.Dense(6, name="first")(layers.Embedding(3, 4)(tokens)))
    return keras.Model(tokens, layers.Dense(CLASSES)(x))


def _regression(outputs="linear"):
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Flatten()(layers.Embedding(3, 4)(tokens))
    x = layers.Dense(6, activation="tanh", name="first")(x)
    x = layers.Dense(6, activation="tanh")(x)
    return keras.Model(tokens, layers.Dense(3, activation=outputs)(x))


def rms(y, p):
    """The root of a mean."""
    return ops.sqrt(ops.mean(ops.square(y - p)))


def f1(y, p):
    """A ratio of sums."""
    y, p = ops.cast(y > 0.5, "float32"), ops.cast(p > 0.5, "float32")
    return 2 * ops.sum(y * p) / (ops.sum(y) + ops.sum(p) + 1e-6)


def _of_classes(y, p):
    return f1(ops.one_hot(y, CLASSES), ops.softmax(p))


class _Batches(keras.metrics.Metric):
    """The mean over batches of the largest error: batches count, not rows."""

    def __init__(self):
        super().__init__(name="largest")
        self.total = self.add_weight(name="total", initializer="zeros")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y, p, sample_weight=None):
        self.total.assign_add(ops.max(ops.abs(y - p)))
        self.count.assign_add(1.0)

    def result(self):
        return self.total / self.count


class _Balancing(keras.losses.Loss):
    """Weights the rows by how many there are of their kind in the batch."""

    def call(self, y, p):
        high = ops.cast(ops.mean(y, axis=-1) > 0.5, "float32")
        share = ops.mean(high)
        return ops.mean(ops.square(y - p), axis=-1) * (high / (share + 0.1) + (1 - high))


@dataclasses.dataclass(frozen=True)
class Example:
    """A model with a loss and metrics."""

    model: Callable[[], keras.Model]
    loss: Callable[[], Any]
    weighted: bool = False
    metrics: Callable[[], list[Any]] = list
    schedule: str = "1f1b"


def _unreduced():
    loss = keras.losses.MeanAbsoluteError(reduction="none")
    return lambda y, p: ops.sum(loss(y, p)) / ops.cast(ops.shape(y)[0], "float32")


def _contrastive(y, p):
    similar = ops.matmul(ops.normalize(p), ops.transpose(ops.normalize(y)))
    return -ops.mean(ops.diagonal(ops.log_softmax(similar)))


_BY_WEIGHTS = _cross_entropy(reduction="mean_with_sample_weight")

EXAMPLES = {
    "a_mask_beside_none": Example(_masked_and_not, _cross_entropy()),
    "a_mask_before_none": Example(_encoder_decoder, _cross_entropy(), True),
    "a_mean_by_weights": Example(_tagger, _BY_WEIGHTS, True),
    "a_mean_by_weights_and_masks": Example(
        lambda: _tagger(True), _BY_WEIGHTS, True, lambda: ["accuracy"]
    ),
    "a_mean_by_masks": Example(lambda: _tagger(True), _BY_WEIGHTS),
    "targets_left_out": Example(_tagger, _cross_entropy(ignore_class=0)),
    # The masks of all rows are known behind the model only.
    "a_mask_of_what_is_computed": Example(_masked_by_itself, _cross_entropy()),
    "a_root_of_a_mean": Example(_regression, lambda: rms, metrics=lambda: [rms, "mae"]),
    "a_root_of_a_mean_zbv": Example(_regression, lambda: rms, schedule="zbv"),
    "a_root_of_a_mean_interleaved": Example(_regression, lambda: rms, schedule="interleaved"),
    "a_ratio_of_sums": Example(_regression, lambda: "mse", metrics=lambda: [f1, _Batches()]),
    "a_ratio_of_classes": Example(_tagger, _cross_entropy(), metrics=lambda: [_of_classes]),
    "dice": Example(lambda: _regression("sigmoid"), keras.losses.Dice),
    "pairs_of_rows": Example(_regression, lambda: _contrastive),
    "balanced": Example(_regression, _Balancing, True),
    "a_sum": Example(_regression, lambda: keras.losses.LogCosh(reduction="sum"), True),
    "unreduced": Example(_regression, lambda: keras.losses.LogCosh(reduction="none"), True),
    "divided_by_the_rows": Example(_regression, _unreduced, metrics=lambda: [rms]),
    "several_metrics": Example(
        _regression,
        lambda: "mse",
        True,
        lambda: [keras.metrics.R2Score(), keras.metrics.RootMeanSquaredError(), "mae"],
    ),
}
