"""Every layer of `keras.layers` in a model with a dense head, trained by Adam on squared errors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers as k

from tests.enumeration.training import (
    ROWS,
    Program,
    Training,
    adam,
    fractions,
    integers,
    numbers,
    public_classes,
)

Shape = tuple[int, ...]

# By name: a function that creates the layer (or a function of the inputs), and the shapes of its
# inputs without the batch. A dense layer precedes it, so that gradients pass through the layer. The
# part of a name after a slash is a variant.
DIFFERENTIABLE: dict[str, tuple[Any, ...]] = {
    "Activation": (lambda: k.Activation("swish"), (3,)),
    "ActivityRegularization": (lambda: k.ActivityRegularization(0.1, 0.2), (3,)),
    "AdaptiveAveragePooling1D": (lambda: k.AdaptiveAveragePooling1D(2), (5, 2)),
    "AdaptiveAveragePooling2D": (lambda: k.AdaptiveAveragePooling2D(2), (5, 4, 2)),
    "AdaptiveAveragePooling3D": (lambda: k.AdaptiveAveragePooling3D(2), (3, 3, 3, 2)),
    "AdaptiveMaxPooling1D": (lambda: k.AdaptiveMaxPooling1D(2), (5, 2)),
    "AdaptiveMaxPooling2D": (lambda: k.AdaptiveMaxPooling2D(2), (5, 4, 2)),
    "AdaptiveMaxPooling3D": (lambda: k.AdaptiveMaxPooling3D(2), (3, 3, 3, 2)),
    "Add": (k.Add, (3,), (3,)),
    "AdditiveAttention": (k.AdditiveAttention, (4, 3), (5, 3)),
    "AlphaDropout": (lambda: k.AlphaDropout(0.3, seed=1), (6,)),
    "Attention": (lambda: k.Attention(use_scale=True), (4, 3), (5, 3)),
    "Attention/dropout": (lambda: k.Attention(dropout=0.3, seed=1), (4, 3), (5, 3)),
    "Attention/causal": (
        lambda: lambda x: k.Attention()([x, x], use_causal_mask=True),
        (4, 3),
    ),
    "Average": (k.Average, (3,), (3,)),
    "AveragePooling1D": (lambda: k.AveragePooling1D(2, padding="same"), (5, 2)),
    "AveragePooling2D": (lambda: k.AveragePooling2D(2, padding="same"), (5, 4, 2)),
    "AveragePooling3D": (lambda: k.AveragePooling3D(2), (3, 3, 3, 2)),
    "BatchNormalization": (k.BatchNormalization, (4,)),
    "BatchNormalization/image": (lambda: k.BatchNormalization(momentum=0.5), (3, 3, 2)),
    "BatchNormalization/axis": (lambda: k.BatchNormalization(axis=1), (3, 2)),
    "BatchNormalization/plain": (lambda: k.BatchNormalization(center=False, scale=False), (4,)),
    "BatchNormalization/synchronized": (lambda: k.BatchNormalization(synchronized=True), (4,)),
    "BatchNormalization/mask": (
        lambda: lambda x: k.BatchNormalization()(k.Masking()(keras.ops.relu(x))),
        (5, 2),
    ),
    "BatchNormalization/frozen": (lambda: k.BatchNormalization(trainable=False), (4,)),
    "Bidirectional": (lambda: k.Bidirectional(k.LSTM(2, return_sequences=True)), (4, 2)),
    "CenterCrop": (lambda: k.CenterCrop(2, 3), (4, 5, 2)),
    "Concatenate": (lambda: k.Concatenate(axis=1), (2, 3), (4, 3)),
    "Conv1D": (lambda: k.Conv1D(2, 3, padding="causal"), (5, 2)),
    "Conv1D/dilated": (lambda: k.Conv1D(4, 2, dilation_rate=2, groups=2), (5, 2)),
    "Conv1DTranspose": (lambda: k.Conv1DTranspose(2, 3, strides=2), (4, 2)),
    "Conv2D": (lambda: k.Conv2D(2, 3, strides=2, padding="same"), (5, 4, 2)),
    "Conv2D/regularized": (lambda: k.Conv2D(2, 1, kernel_regularizer="l2"), (3, 3, 2)),
    "Conv2DTranspose": (lambda: k.Conv2DTranspose(2, 2, strides=2), (3, 3, 2)),
    "Conv3D": (lambda: k.Conv3D(2, 2), (3, 3, 3, 2)),
    "Conv3DTranspose": (lambda: k.Conv3DTranspose(2, 2), (2, 2, 2, 2)),
    "ConvLSTM1D": (lambda: k.ConvLSTM1D(2, 2), (2, 4, 2)),
    "ConvLSTM2D": (lambda: k.ConvLSTM2D(2, 2), (2, 3, 3, 2)),
    "ConvLSTM3D": (lambda: k.ConvLSTM3D(1, 2), (2, 2, 2, 2, 1)),
    "Cropping1D": (lambda: k.Cropping1D((1, 2)), (5, 2)),
    "Cropping2D": (lambda: k.Cropping2D(1), (4, 5, 2)),
    "Cropping3D": (lambda: k.Cropping3D(1), (3, 4, 3, 2)),
    "Dense": (lambda: k.Dense(3, "relu", kernel_regularizer="l2"), (4,)),
    "Dense/activity": (lambda: k.Dense(3, activity_regularizer="l1"), (4,)),
    "Dense/constraint": (
        lambda: k.Dense(3, kernel_constraint=keras.constraints.MaxNorm(0.5)),
        (4,),
    ),
    "Dense/lora": (lambda: k.Dense(3, lora_rank=2), (4,)),
    "Dense/sequence": (lambda: k.Dense(3, bias_regularizer="l1"), (4, 2)),
    "DepthwiseConv1D": (lambda: k.DepthwiseConv1D(2, depth_multiplier=2), (5, 2)),
    "DepthwiseConv2D": (lambda: k.DepthwiseConv2D(2), (4, 3, 2)),
    "Dot": (lambda: k.Dot(axes=1, normalize=True), (4,), (4,)),
    "Dropout": (lambda: k.Dropout(0.4, seed=1), (6,)),
    "Dropout/default seed": (lambda: k.Dropout(0.4), (6,)),
    "Dropout/shape": (lambda: k.Dropout(0.4, noise_shape=(None, 1, 3), seed=1), (2, 3)),
    "Dropout/same for all rows": (lambda: k.Dropout(0.4, noise_shape=(1, 6), seed=1), (6,)),
    "ELU": (k.ELU, (3,)),
    "EinsumDense": (lambda: k.EinsumDense("abc,cd->abd", (2, 3), bias_axes="d"), (2, 4)),
    "Flatten": (k.Flatten, (2, 3)),
    "GRU": (lambda: k.GRU(3), (4, 2)),
    "GRU/sequences": (lambda: k.GRU(3, return_sequences=True, dropout=0.3, seed=1), (4, 2)),
    "GRUCell": (lambda: k.RNN(k.GRUCell(3)), (4, 2)),
    "GaussianDropout": (lambda: k.GaussianDropout(0.3, seed=1), (6,)),
    "GaussianNoise": (lambda: k.GaussianNoise(0.5, seed=1), (6,)),
    "GlobalAveragePooling1D": (k.GlobalAveragePooling1D, (4, 3)),
    "GlobalAveragePooling1D/mask": (
        lambda: lambda x: k.GlobalAveragePooling1D()(k.Masking()(keras.ops.relu(x))),
        (4, 2),
    ),
    "GlobalAveragePooling2D": (k.GlobalAveragePooling2D, (4, 3, 2)),
    "GlobalAveragePooling3D": (k.GlobalAveragePooling3D, (2, 3, 2, 2)),
    "GlobalMaxPooling1D": (k.GlobalMaxPooling1D, (4, 3)),
    "GlobalMaxPooling2D": (k.GlobalMaxPooling2D, (4, 3, 2)),
    "GlobalMaxPooling3D": (k.GlobalMaxPooling3D, (2, 3, 2, 2)),
    "GroupNormalization": (lambda: k.GroupNormalization(2), (3, 4)),
    "GroupQueryAttention": (
        lambda: lambda x, y: k.GroupQueryAttention(2, 4, 2)(x, y),
        (3, 4),
        (5, 4),
    ),
    "Identity": (k.Identity, (3,)),
    "LSTM": (lambda: k.LSTM(3), (4, 2)),
    "LSTM/dropout": (lambda: k.LSTM(3, dropout=0.3, recurrent_dropout=0.2, seed=1), (4, 2)),
    "LSTM/mask": (lambda: lambda x: k.LSTM(3)(k.Masking()(keras.ops.relu(x))), (5, 2)),
    "LSTM/unrolled": (lambda: k.LSTM(3, unroll=True, go_backwards=True), (3, 2)),
    "LSTMCell": (lambda: k.RNN(k.LSTMCell(3)), (4, 2)),
    "Lambda": (lambda: k.Lambda(lambda x: x * x), (3,)),
    "Lambda/batch mean": (lambda: k.Lambda(lambda x: x - keras.ops.mean(x, axis=0)), (3,)),
    "LayerNormalization": (k.LayerNormalization, (3, 4)),
    "LeakyReLU": (k.LeakyReLU, (3,)),
    "Masking": (lambda: lambda x: k.SimpleRNN(2)(k.Masking()(keras.ops.relu(x))), (5, 2)),
    "MaxPooling1D": (lambda: k.MaxPooling1D(2), (5, 2)),
    "MaxPooling2D": (lambda: k.MaxPooling2D(2, padding="same"), (5, 4, 2)),
    "MaxPooling3D": (lambda: k.MaxPooling3D(2), (3, 3, 3, 2)),
    "Maximum": (k.Maximum, (3,), (3,)),
    "Minimum": (k.Minimum, (3,), (3,)),
    "MultiHeadAttention": (lambda: lambda x, y: k.MultiHeadAttention(2, 3)(x, y), (3, 4), (5, 4)),
    "MultiHeadAttention/causal": (
        lambda: (
            lambda x: k.MultiHeadAttention(2, 3, dropout=0.2, seed=1)(x, x, use_causal_mask=True)
        ),
        (4, 4),
    ),
    "Multiply": (k.Multiply, (3,), (3,)),
    "PReLU": (lambda: k.PReLU(shared_axes=[1]), (2, 3)),
    "Permute": (lambda: k.Permute((2, 1)), (2, 3)),
    "RMSNormalization": (k.RMSNormalization, (3, 4)),
    "RNN": (lambda: k.RNN(k.SimpleRNNCell(3), return_sequences=True), (4, 2)),
    "ReLU": (lambda: k.ReLU(6.0, 0.1), (3,)),
    "RepeatVector": (lambda: k.RepeatVector(2), (3,)),
    "Rescaling": (lambda: k.Rescaling(0.5, 1.0), (3,)),
    "Reshape": (lambda: k.Reshape((3, -1)), (2, 3)),
    "Resizing": (lambda: k.Resizing(3, 2), (4, 5, 2)),
    "SeparableConv1D": (lambda: k.SeparableConv1D(2, 2), (5, 2)),
    "SeparableConv2D": (lambda: k.SeparableConv2D(2, 2), (4, 3, 2)),
    "SimpleRNN": (lambda: k.SimpleRNN(3), (4, 2)),
    "SimpleRNNCell": (lambda: k.RNN(k.SimpleRNNCell(3)), (4, 2)),
    "Softmax": (k.Softmax, (4,)),
    "SpatialDropout1D": (lambda: k.SpatialDropout1D(0.4, seed=1), (3, 4)),
    "SpatialDropout2D": (lambda: k.SpatialDropout2D(0.4, seed=1), (2, 2, 4)),
    "SpatialDropout3D": (lambda: k.SpatialDropout3D(0.4, seed=1), (2, 2, 1, 4)),
    "SpectralNormalization": (lambda: k.SpectralNormalization(k.Dense(3)), (4,)),
    "StackedRNNCells": (
        lambda: k.RNN(k.StackedRNNCells([k.LSTMCell(2), k.GRUCell(3)])),
        (4, 2),
    ),
    "Subtract": (k.Subtract, (3,), (3,)),
    "TimeDistributed": (lambda: k.TimeDistributed(k.Dense(2, "tanh")), (3, 4)),
    "TimeDistributed/normalized": (lambda: k.TimeDistributed(k.BatchNormalization()), (3, 4)),
    "UnitNormalization": (k.UnitNormalization, (4,)),
    "UpSampling1D": (lambda: k.UpSampling1D(2), (2, 3)),
    "UpSampling2D": (lambda: k.UpSampling2D(2, interpolation="bilinear"), (2, 3, 2)),
    "UpSampling3D": (lambda: k.UpSampling3D(2), (2, 1, 2, 2)),
    "Wrapper": (lambda: Doubling(k.Dense(2)), (4,)),
    "ZeroPadding1D": (lambda: k.ZeroPadding1D(1), (2, 3)),
    "ZeroPadding2D": (lambda: k.ZeroPadding2D(1), (2, 1, 3)),
    "ZeroPadding3D": (lambda: k.ZeroPadding3D(1), (1, 1, 2, 3)),
    # Normalization by statistics that are known before the training.
    "Normalization": (
        lambda: k.Normalization(mean=[0.5, 0.0, 1.0], variance=[2.0, 1.0, 0.5]),
        (3,),
    ),
    "Normalization/adapted": (lambda: _adapted(k.Normalization(), numbers(9, 3, seed=4)), (3,)),
}

# Layers that take images; some have no gradients.
IMAGES: dict[str, Callable[[], Any]] = {
    "AugMix": lambda: k.AugMix(value_range=(0, 1), seed=1),
    "AutoContrast": lambda: k.AutoContrast(value_range=(0, 1)),
    "ContrastLimitedAdaptiveHistogramEqualization": lambda: (
        k.ContrastLimitedAdaptiveHistogramEqualization(value_range=(0, 1), tile_grid_size=(2, 2))
    ),
    "CutMix": lambda: k.CutMix(seed=1),
    "Equalization": lambda: k.Equalization(value_range=(0, 1)),
    "MixUp": lambda: k.MixUp(seed=1),
    "Pipeline": lambda: k.Pipeline([k.Rescaling(2.0), k.RandomFlip(seed=1)]),
    "RandAugment": lambda: k.RandAugment(value_range=(0, 1), seed=1),
    "RandomBrightness": lambda: k.RandomBrightness(0.4, value_range=(0, 1), seed=1),
    "RandomColorDegeneration": lambda: k.RandomColorDegeneration(0.5, value_range=(0, 1), seed=1),
    "RandomColorJitter": lambda: k.RandomColorJitter((0, 1), 0.3, 0.3, (0.2, 0.8), 0.3, seed=1),
    "RandomContrast": lambda: k.RandomContrast(0.4, value_range=(0, 1), seed=1),
    "RandomElasticTransform": lambda: k.RandomElasticTransform(value_range=(0, 1), seed=1),
    "RandomErasing": lambda: k.RandomErasing(value_range=(0, 1), seed=1),
    "RandomFlip": lambda: k.RandomFlip(seed=1),
    "RandomGaussianBlur": lambda: k.RandomGaussianBlur(value_range=(0, 1), seed=1),
    "RandomGrayscale": lambda: k.RandomGrayscale(seed=1),
    "RandomHue": lambda: k.RandomHue(0.4, value_range=(0, 1), seed=1),
    "RandomInvert": lambda: k.RandomInvert(value_range=(0, 1), seed=1),
    "RandomPerspective": lambda: k.RandomPerspective(seed=1),
    "RandomPosterization": lambda: k.RandomPosterization(4, value_range=(0, 1), seed=1),
    "RandomRotation": lambda: k.RandomRotation(0.2, seed=1),
    "RandomSaturation": lambda: k.RandomSaturation(0.4, value_range=(0, 1), seed=1),
    "RandomSharpness": lambda: k.RandomSharpness(0.4, value_range=(0, 1), seed=1),
    "RandomShear": lambda: k.RandomShear(0.3, 0.3, seed=1),
    "RandomTranslation": lambda: k.RandomTranslation(0.3, 0.3, seed=1),
    "RandomZoom": lambda: k.RandomZoom(0.3, seed=1),
    "Solarization": lambda: k.Solarization(value_range=(0, 1)),
}

# Layers that take integers below a limit.
INTEGERS: dict[str, tuple[Any, int, Shape]] = {
    "CategoryEncoding": (lambda: k.CategoryEncoding(5, output_mode="count"), 5, (4,)),
    "CategoryEncoding/multi hot": (lambda: k.CategoryEncoding(5, output_mode="multi_hot"), 5, (4,)),
    "Embedding": (lambda: k.Embedding(5, 3), 5, (4,)),
    "Embedding/constraint": (
        lambda: k.Embedding(5, 3, embeddings_constraint=keras.constraints.UnitNorm(1)),
        5,
        (4,),
    ),
    "Embedding/mask": (
        lambda: lambda x: k.GRU(2)(k.Embedding(5, 3, mask_zero=True)(x)),
        5,
        (4,),
    ),
    "Embedding/mask of attention": (
        lambda: (
            lambda x: (lambda e: k.MultiHeadAttention(2, 2)(e, e))(
                k.Embedding(5, 3, mask_zero=True)(x)
            )
        ),
        5,
        (4,),
    ),
    "Hashing": (lambda: k.Hashing(4, output_mode="one_hot"), 50, (1,)),
    "IntegerLookup": (
        lambda: k.IntegerLookup(vocabulary=[3, 1, 4], output_mode="multi_hot"),
        6,
        (4,),
    ),
    "ReversibleEmbedding": (lambda: k.ReversibleEmbedding(5, 3), 5, (4,)),
    "ReversibleEmbedding/tied": (lambda: _tied, 5, (4,)),
}


class Doubling(k.Wrapper):
    def call(self, x):
        return 2 * self.layer(x)

    def build(self, shape):
        self.layer.build(shape)
        super().build(shape)


def _adapted(layer: Any, data: Any) -> Any:
    layer.adapt(data)
    return layer


def _tied(tokens: Any) -> Any:
    table = k.ReversibleEmbedding(5, 3)
    return table(k.Dense(3, "tanh")(table(tokens)), reverse=True)


def _ends(inputs: Any, middle: Any) -> keras.Model:
    """Returns a model with a dense head on the output of a layer."""
    if middle.dtype != "float32":
        middle = keras.ops.cast(middle, "float32")
    if len(middle.shape) > 2:
        middle = k.Flatten()(middle)
    return keras.Model(inputs, k.Dense(2, name="head")(middle))


def _compile() -> dict[str, Any]:
    return {"optimizer": adam(), "loss": "mse", "metrics": ["mae"]}


def _targets() -> np.ndarray:
    return numbers(ROWS, 2, seed=9)


def _differentiable(create: Any, *shapes: Shape) -> Program:
    def model() -> keras.Model:
        inputs = [keras.Input(shape) for shape in shapes]
        fronts = [
            k.Dense(shape[-1], name=f"front_{i}")(x)
            for i, (x, shape) in enumerate(zip(inputs, shapes, strict=True))
        ]
        layer = create()
        takes_a_list = isinstance(layer, k.Layer) and len(fronts) > 1
        return _ends(inputs, layer(fronts) if takes_a_list else layer(*fronts))

    def data() -> tuple[Any, ...]:
        x = [numbers(ROWS, *shape, seed=i) for i, shape in enumerate(shapes)]
        return (x if len(x) > 1 else x[0], _targets())

    return Training(model, data, _compile)


def _of_images(create: Any, steps: tuple[str, ...] = ("evaluate", "predict")) -> Program:
    def model() -> keras.Model:
        inputs = keras.Input((6, 6, 3))
        return _ends(inputs, create()(inputs))

    return Training(model, lambda: (fractions(ROWS, 6, 6, 3), _targets()), _compile, steps=steps)


def _of_integers(create: Any, limit: int, shape: Shape) -> Program:
    def model() -> keras.Model:
        inputs = keras.Input(shape, dtype="int32")
        return _ends(inputs, create()(inputs))

    return Training(model, lambda: (integers(limit, ROWS, *shape), _targets()), _compile)


def _discretization() -> keras.Model:
    inputs = keras.Input((3,))
    return _ends(inputs, k.Discretization([-0.5, 0.0, 1.0], output_mode="one_hot")(inputs))


def _crossing() -> keras.Model:
    inputs = [keras.Input((1,), dtype="int32"), keras.Input((1,), dtype="int32")]
    return _ends(inputs, k.HashedCrossing(5, output_mode="one_hot")(inputs))


def _text(create: Any) -> Callable[[], keras.Model]:
    def model() -> keras.Model:
        inputs = keras.Input((1,), dtype="string")
        return _ends(inputs, create()(inputs))

    return model


def _words() -> tuple[Any, ...]:
    words = np.array(["the cat", "a dog", "the dog sat", "a cat sat", "what"])
    import tensorflow as tf

    return tf.constant(words[integers(5, ROWS, 1)]), _targets()


def _spectrogram(create: Any) -> Program:
    def model() -> keras.Model:
        inputs = keras.Input((32,))
        return _ends(inputs, create()(k.Dense(32, name="front")(inputs)))

    return Training(model, lambda: (numbers(ROWS, 32), _targets()), _compile)


class Boxes(keras.Model):
    """Trains on at most two boxes of each image."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = k.MaxNumBoundingBoxes(2, fill_value=0, bounding_box_format="xyxy")
        self.head = k.Dense(2)

    def call(self, inputs, training=False):
        limited = self.limit(inputs, training=training)["bounding_boxes"]
        return self.head(keras.ops.reshape(limited["boxes"], (-1, 8)))


def _boxes() -> tuple[Any, ...]:
    boxes = {"boxes": fractions(ROWS, 3, 4), "labels": integers(3, ROWS, 3).astype("float32")}
    return {"images": fractions(ROWS, 2, 2, 3), "bounding_boxes": boxes}, _targets()


class Stateful(keras.Model):
    """A model with a custom layer that has state, a loss and a regularizer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Own()
        self.head = k.Dense(2)

    def call(self, x, training=False):
        return self.head(self.layer(x, training=training))


class Own(k.Layer):
    def build(self, shape):
        self.scale = self.add_weight((shape[-1],), "ones", regularizer="l2", name="scale")
        self.mean = self.add_weight((shape[-1],), "zeros", trainable=False, name="mean")

    def call(self, x, training=False):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x, axis=0))
            self.add_loss(0.01 * keras.ops.mean(keras.ops.square(x * self.scale)))
        return (x - self.mean) * self.scale


PROGRAMS: dict[str, Program] = {
    **{name: _differentiable(*case) for name, case in DIFFERENTIABLE.items()},
    **{name: _of_images(create) for name, create in IMAGES.items()},
    **{name: _of_integers(*case) for name, case in INTEGERS.items()},
    "Discretization": Training(_discretization, lambda: (numbers(ROWS, 3), _targets()), _compile),
    "HashedCrossing": Training(
        _crossing,
        lambda: ([integers(9, ROWS, 1), integers(9, ROWS, 1, seed=1)], _targets()),
        _compile,
    ),
    "Layer": Training(Stateful, lambda: (numbers(ROWS, 4), _targets()), _compile),
    "MaxNumBoundingBoxes": Training(Boxes, _boxes, _compile),
    "MelSpectrogram": _spectrogram(
        lambda: k.MelSpectrogram(
            fft_length=8, sequence_stride=8, sequence_length=8, sampling_rate=100, num_mel_bins=3
        )
    ),
    "STFTSpectrogram": _spectrogram(
        lambda: (
            lambda x: k.STFTSpectrogram(frame_length=8, frame_step=8, fft_length=8, trainable=True)(
                k.Reshape((32, 1))(x)
            )
        )
    ),
    # Outside of training it does not crop, and the head takes cropped images only.
    "RandomCrop": _of_images(lambda: k.RandomCrop(3, 3, seed=1), steps=()),
    "StringLookup": Training(
        _text(lambda: k.StringLookup(vocabulary=["the cat", "a dog"], output_mode="one_hot")),
        _words,
        _compile,
    ),
    "TextVectorization": Training(
        _text(
            lambda: (
                lambda x: k.Embedding(6, 3)(
                    k.TextVectorization(
                        vocabulary=["the", "cat", "dog", "sat"], output_sequence_length=3
                    )(x)
                )
            )
        ),
        _words,
        _compile,
    ),
}


class Later(keras.Model):
    """Creates its layers in its first step."""

    def __init__(self, create: Callable[[], keras.Model]) -> None:
        super().__init__()
        self.create = create

    def build(self, shape):
        self.later = self.create()
        super().build(shape)

    def call(self, x):
        return self.later(x)


class Augmented(keras.Model):
    """A model with a `Sequential` that is built in its first step, when Keras knows it trains.

    `Resizing` has the default `training=True`. The `Sequential` keeps the value of its first call,
    and makes the layers after it train, since the model's call has no such argument.
    """

    def __init__(self) -> None:
        super().__init__()
        self.augment = keras.Sequential([k.Resizing(3, 3), k.RandomFlip(seed=1)])

    def build(self, shape):
        self.behind = [k.Flatten(), k.Dropout(0.5, seed=1), k.Dense(2)]

    def call(self, x):
        x = self.augment(x)
        for layer in self.behind:
            x = layer(x)
        return x


# Keras also fails in one process: these layers keep constants of the graph that created them.
_OF_THEIR_GRAPH = (
    *("Dense/activity", "Dense/sequence", "Normalization", "Normalization/adapted"),
    "TextVectorization",
)
PROGRAMS |= {
    f"{name}/built by fit": dataclasses.replace(
        program, model=functools.partial(Later, program.model)
    )
    for name, program in PROGRAMS.items()
    if isinstance(program, Training)
    and program.model not in (Boxes, Stateful)
    and name not in _OF_THEIR_GRAPH
}
PROGRAMS["Resizing/in a Sequential"] = Training(
    Augmented, lambda: (fractions(ROWS, 4, 4, 3), _targets()), _compile
)

DEFAULT = ["BatchNormalization"]


def missing() -> set[str]:
    """The public layers without a program."""
    return set(public_classes(keras.layers, k.Layer)) - {
        name.partition("/")[0] for name in PROGRAMS
    }
