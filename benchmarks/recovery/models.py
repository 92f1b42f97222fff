"""The models. A training step of each model is short: about ten milliseconds or less with Adam."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdist
from benchmarks.recovery.sizes import CLASSES, HIDDEN, ROWS, SHAPES


def strategy_of(name: str, shard_optimizer: bool) -> tf.distribute.Strategy:
    """Returns the strategy for a model: one pipeline of all workers, or data parallelism."""
    if name == "pipeline":
        return tfdist.PipelineStrategy(microbatches=4)
    return tfdist.MultiWorkerMirroredStrategy(shard_optimizer=shard_optimizer)


def build(name: str) -> keras.Model:
    """Returns a model that outputs logits for ten classes. The model is not compiled yet."""
    if name == "pipeline":
        return tfdist.PipelineModel(lambda: whole(name), balance="parameters")
    return whole(name)


def whole(name: str) -> keras.Model:
    """Returns the model as an ordinary Keras model, which is not divided into stages."""
    inputs = keras.Input(SHAPES[name])
    x = inputs
    if name in HIDDEN:
        for _ in range(HIDDEN[name]):
            x = layers.Dense(256, "relu")(x)
        return keras.Model(inputs, layers.Dense(CLASSES)(x))
    for filters in (8, 16, 16, 32):
        x = layers.Conv2D(filters, 3, 2, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))


def endless(name: str, workers: int) -> tf.data.Dataset:
    """Returns a dataset that repeats one batch forever. Reading it takes almost no time."""
    random = np.random.default_rng(0)
    rows = ROWS[name] * workers
    x = random.standard_normal((rows, *SHAPES[name])).astype("float32")
    y = random.integers(CLASSES, size=rows).astype("int32")
    return tf.data.Dataset.from_tensors((x, y)).repeat()
