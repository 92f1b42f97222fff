"""The models in Keras. They are not compiled yet."""

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
    """Returns a model with stages that wait instead of computing.

    All stages wait for the same time. The model begins with a dense layer. Because of its weights,
    the first stage also computes an input gradient, and so waits as often as the other stages.

    Args:
        stages: the number of stages. The names of their last layers are `wait_0`, `wait_1` and so
            on.
        seconds: the time of each of the three passes through a stage.
    """
    waits = [Wait(seconds, name=f"wait_{i}") for i in range(stages)]
    return keras.Sequential([keras.Input([1]), keras.layers.Dense(1), *waits])
