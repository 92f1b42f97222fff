"""The models in Keras. They output logits, and are not compiled yet."""

from __future__ import annotations

import keras
from keras import layers


def tiny() -> keras.Model:
    """Returns a small model for tests."""
    return keras.Sequential([keras.Input([8]), layers.Dense(4)])


def mlp() -> keras.Model:
    """Returns a model with 8.4 million parameters. Communication dominates its training step."""
    hidden = [layers.Dense(2048, "relu") for _ in range(2)]
    return keras.Sequential([keras.Input([2048]), *hidden, layers.Dense(10)])


def convolve(x: keras.KerasTensor, filters: int, stride: int = 1) -> keras.KerasTensor:
    """Applies a convolution, batch normalization and ReLU."""
    x = layers.Conv2D(filters, 3, stride, padding="same", use_bias=False)(x)
    return layers.ReLU()(layers.BatchNormalization()(x))


def cnn() -> keras.Model:
    """Returns a residual network for 32x32 images: seven convolutions with batch normalization."""

    images = keras.Input([32, 32, 3])
    x = convolve(images, 32)
    for filters in (32, 64, 128):
        short = layers.Conv2D(filters, 1, 2)(x)
        x = short + convolve(convolve(x, filters, 2), filters)
    return keras.Model(images, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def resnet() -> keras.Model:
    """Returns ResNet-20 for 32x32 images: 19 convolutions of 3x3 with batch normalization."""
    images = keras.Input([32, 32, 3])
    x = convolve(images, 16)
    for filters in (16, 32, 64):
        for block in range(3):
            stride = 2 if filters > 16 and not block else 1
            short = layers.Conv2D(filters, 1, stride)(x) if stride > 1 else x
            x = short + convolve(convolve(x, filters, stride), filters)
    return keras.Model(images, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def gpt() -> keras.Model:
    """Returns a causal transformer for sequences of 128 characters.

    It has six blocks, width 256 and 4.9 million parameters.
    """
    tokens = keras.Input([128], dtype="int32")
    positions = keras.ops.cumsum(keras.ops.ones_like(tokens), axis=1) - 1
    x = layers.Embedding(256, 256)(tokens) + layers.Embedding(128, 256)(positions)
    for _ in range(6):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(8, 32)(y, y, use_causal_mask=True)
        y = layers.Dense(1024, "gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(256)(y)
    return keras.Model(tokens, layers.Dense(256)(layers.LayerNormalization()(x)))


def lstm() -> keras.Model:
    """Returns a model with two LSTM layers of 256 units for sequences of 64 tokens.

    Its training step consists of many small operations in loops.
    """
    tokens = keras.Input([64], dtype="int32")
    x = layers.LSTM(256, return_sequences=True)(layers.Embedding(1000, 128)(tokens))
    return keras.Model(tokens, layers.Dense(1000)(layers.LSTM(256)(x)))


BUILDERS = {"tiny": tiny, "mlp": mlp, "cnn": cnn, "resnet": resnet, "gpt": gpt, "lstm": lstm}
