"""The models that are timed, each with random data of the right shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model and what one worker feeds it in a step.

    Attributes:
        build: makes the Keras model, not compiled; it returns logits.
        shape: one row of the input.
        labels: one row of the labels.
        classes: labels, and input where it is integers, are below this.
        rows: rows per worker and step.
        steps: steps in a round, unless the user says otherwise.
        integers: whether the input is integers.
    """

    build: Callable[[], Any]
    shape: tuple[int, ...]
    labels: tuple[int, ...]
    classes: int
    rows: int
    steps: int
    integers: bool = False

    def data(self, rows: int) -> tuple[Any, Any]:
        """A batch of random inputs and labels, the same at each call."""
        import numpy as np

        random = np.random.default_rng(0)
        if self.integers:
            x = random.integers(self.classes, size=(rows, *self.shape)).astype("int32")
        else:
            x = random.standard_normal((rows, *self.shape)).astype("float32")
        return x, random.integers(self.classes, size=(rows, *self.labels)).astype("int32")


def tiny() -> Any:
    """Small enough for a test."""
    import keras

    return keras.Sequential([keras.Input([8]), keras.layers.Dense(4)])


def mlp() -> Any:
    """8.4 million parameters and little to compute: the gradients' way decides."""
    import keras

    hidden = [keras.layers.Dense(2048, "relu") for _ in range(2)]
    return keras.Sequential([keras.Input([2048]), *hidden, keras.layers.Dense(10)])


def cnn() -> Any:
    """A residual network of seven convolutions for images of 32x32, with batch normalisation."""
    import keras
    from keras import layers

    def convolve(x: Any, filters: int, stride: int = 1) -> Any:
        x = layers.Conv2D(filters, 3, stride, padding="same", use_bias=False)(x)
        return layers.ReLU()(layers.BatchNormalization()(x))

    images = keras.Input([32, 32, 3])
    x = convolve(images, 32)
    for filters in (32, 64, 128):
        short = layers.Conv2D(filters, 1, 2)(x)
        x = short + convolve(convolve(x, filters, 2), filters)
    return keras.Model(images, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def gpt() -> Any:
    """A causal transformer of six blocks, 256 wide, over 128 characters: 4.9 million parameters."""
    import keras
    from keras import layers

    tokens = keras.Input([128], dtype="int32")
    positions = keras.ops.cumsum(keras.ops.ones_like(tokens), axis=1) - 1
    x = layers.Embedding(256, 256)(tokens) + layers.Embedding(128, 256)(positions)
    for _ in range(6):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(8, 32)(y, y, use_causal_mask=True)
        y = layers.Dense(1024, "gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(256)(y)
    return keras.Model(tokens, layers.Dense(256)(layers.LayerNormalization()(x)))


MODELS = {
    "tiny": Workload(tiny, (8,), (), 4, rows=4, steps=3),
    "mlp": Workload(mlp, (2048,), (), 10, rows=32, steps=10),
    "cnn": Workload(cnn, (32, 32, 3), (), 10, rows=32, steps=10),
    "gpt": Workload(gpt, (128,), (128,), 256, rows=4, steps=5, integers=True),
}
