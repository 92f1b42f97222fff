"""The models whose steps are timed: about ten milliseconds each, with Adam."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers

SHAPES = {"mlp": (256,), "batchnorm": (16, 16, 3), "tiny": (8,)}
ROWS = {"mlp": 32, "batchnorm": 16, "tiny": 4}  # per worker and step


def build(name: str) -> keras.Model:
    """A model that returns logits of ten classes, not compiled."""
    inputs = keras.Input(SHAPES[name])
    if name == "tiny":
        return keras.Model(inputs, layers.Dense(10)(inputs))
    if name == "mlp":
        x = inputs
        for _ in range(3):
            x = layers.Dense(256, "relu")(x)
        return keras.Model(inputs, layers.Dense(10)(x))
    x = inputs
    for filters in (8, 16, 16, 32):
        x = layers.Conv2D(filters, 3, 2, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def endless(name: str, workers: int) -> tf.data.Dataset:
    """The same batch for ever, which costs next to nothing to read."""
    random = np.random.default_rng(0)
    rows = ROWS[name] * workers
    x = random.standard_normal((rows, *SHAPES[name])).astype("float32")
    y = random.integers(10, size=rows).astype("int32")
    return tf.data.Dataset.from_tensors((x, y)).repeat()
