"""Losses that are divided by a number of the whole batch, in stages and in one process."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
from keras import layers, ops

import tfdist
from tests.strategies.behaviours.faults import message
from tfdist.internals.variables import has_value

ROWS, BATCH, LENGTH, CLASSES = 21, 8, 5, 4


def run(strategy, name):
    """Trains and evaluates: the logs, and the variables that this process holds."""
    model, whole, data = _made(strategy, name)
    x, y, weights = data
    settings = {"sample_weight": weights, "batch_size": BATCH, "verbose": 0}
    history = model.fit(x, y, epochs=2, shuffle=False, **settings).history
    logs = model.evaluate(x, y, return_dict=True, **settings)
    held = {i: np.array(v) for i, v in enumerate(whole.variables) if has_value(v)}
    return {"history": history, "logs": logs, "own": held}


def refused(strategy):
    model, _, (x, y, _) = _made(strategy, "a_mask_of_what_is_computed")
    return message(lambda: model.fit(x, y, verbose=0))


def _made(strategy, name):
    keras.utils.set_random_seed(0)
    build, loss, weighted = EXAMPLES[name]
    if strategy is None:
        model = whole = build()
        scope = contextlib.nullcontext
    else:
        strategy = tfdist.HybridStrategy(pipeline_size=2, microbatches=3)
        scope = strategy.scope
        with scope():
            model = tfdist.PipelineModel(build, cuts=["first"])
        whole = model.partition.graph.model
    with scope():
        model.compile(keras.optimizers.SGD(0.1), loss())
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, size=(ROWS, LENGTH)).astype("int32")
    numbers = rng.normal(size=(ROWS, LENGTH, 3)).astype("float32")
    x = [tokens, numbers][: len(whole.inputs)]
    length = whole.outputs[0].shape[1]
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


_BY_WEIGHTS = _cross_entropy(reduction="mean_with_sample_weight")

# name -> the model, its loss, whether there are sample weights.
EXAMPLES = {
    "a_mask_beside_none": (_masked_and_not, _cross_entropy(), False),
    "a_mask_before_none": (_encoder_decoder, _cross_entropy(), True),
    "a_mean_by_weights": (_tagger, _BY_WEIGHTS, True),
    "a_mean_by_weights_and_masks": (lambda: _tagger(True), _BY_WEIGHTS, True),
    "a_mean_by_masks": (lambda: _tagger(True), _BY_WEIGHTS, False),
    "targets_left_out": (_tagger, _cross_entropy(ignore_class=0), False),
    "a_mask_of_what_is_computed": (_masked_by_itself, _cross_entropy(), False),
}
