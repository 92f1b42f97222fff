"""The models in Keras, not compiled."""

from __future__ import annotations

import keras
from keras import layers

from benchmarks.pipeline.batch import HEADS, Workload
from benchmarks.pipeline.waiting import Wait


def gpt(size: Workload) -> keras.Model:
    """Returns a causal transformer that outputs logits."""
    tokens = keras.Input([size.length], dtype="int32")
    positions = keras.ops.cumsum(keras.ops.ones_like(tokens), axis=1) - 1
    x = layers.Embedding(size.vocabulary, size.width)(tokens)
    x += layers.Embedding(size.length, size.width)(positions)
    for _ in range(size.blocks):
        y = layers.LayerNormalization()(x)
        attend = layers.MultiHeadAttention(HEADS, size.width // HEADS)
        x += attend(y, y, use_causal_mask=True)
        y = layers.Dense(4 * size.width, "gelu")(layers.LayerNormalization()(x))
        x += layers.Dense(size.width)(y)
    return keras.Model(tokens, layers.Dense(size.vocabulary)(layers.LayerNormalization()(x)))


def padded(stages: int, seconds: float) -> keras.Model:
    """Returns a model with stages that only wait, all for the same time.

    The model begins with a weight, so that the first stage also computes its input gradient.

    Args:
        stages: the number of stages; their last layers are `wait_0`, `wait_1`, ...
        seconds: the wait of each of a stage's three passes.
    """
    waits = [Wait(seconds, name=f"wait_{i}") for i in range(stages)]
    return keras.Sequential([keras.Input([1]), keras.layers.Dense(1), *waits])
