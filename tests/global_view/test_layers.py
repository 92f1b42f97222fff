"""Every layer of Keras trains on workers' rows as on the whole batch."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.global_view.simulation import analyze, check, gathers, trace
from tests.harness.tiers import exhaustive, some

_ROWS = 11
SHARES = [(4, 4, 3), (6, 5), (11, 0)]


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer and its operands.

    Attributes:
        make: makes the layer.
        shapes: the shape of each operand, without the rows.
        draw: draws an operand, given a generator and a shape; normal numbers by default.
        call: calls the layer on its operands, if these are not its only arguments.
        gathers: the types of the operations that couple rows.
        adapt: whether the layer learns from data before it is called.
    """

    make: Callable[[], Any]
    shapes: tuple[tuple[int, ...], ...]
    draw: Callable[..., Any] | None = None
    call: Callable[..., Any] | None = None
    gathers: tuple[str, ...] = ()
    adapt: bool = False


def integers(most: int) -> Callable[..., Any]:
    return lambda rng, shape: rng.integers(0, most, shape).astype("int32")


def words(rng: Any, shape: Any) -> Any:
    return rng.choice(np.array([b"one", b"two", b"three", b"and four"], dtype=object), shape)


def pixels(rng: Any, shape: Any) -> Any:
    return rng.uniform(0, 255, shape).astype("float32")


def case(make: Callable[[], Any], *shapes: tuple[int, ...], **more: Any) -> Case:
    return Case(make, shapes, **more)


def _list(layer: Any, *x: Any) -> Any:
    return layer(list(x))


def _cell(states: int) -> Callable[..., Any]:
    def call(layer: Any, x: Any, *h: Any) -> Any:
        assert len(h) == states
        return layer(x, list(h))

    return call


class Masked(layers.Layer):
    """Calls a layer with a mask for the steps of a sequence."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        self.built = True

    def call(self, x: Any) -> Any:
        mask = keras.ops.any(x[:, :, :1] > -0.3, axis=-1)
        return self.layer(x, mask=mask)


L, IMAGE, T = (5, 4), (6, 6, 3), (4, 4, 4, 2)  # a sequence, an image, a volume

CASES: dict[str, Case] = {
    "Activation": case(lambda: layers.Activation("gelu"), L),
    "ActivityRegularization": case(lambda: layers.ActivityRegularization(0.1, 0.1), L),
    "AdaptiveAveragePooling1D": case(lambda: layers.AdaptiveAveragePooling1D(2), L),
    "AdaptiveAveragePooling2D": case(lambda: layers.AdaptiveAveragePooling2D(2), IMAGE),
    "AdaptiveAveragePooling3D": case(lambda: layers.AdaptiveAveragePooling3D(2), T),
    "AdaptiveMaxPooling1D": case(lambda: layers.AdaptiveMaxPooling1D(2), L),
    "AdaptiveMaxPooling2D": case(lambda: layers.AdaptiveMaxPooling2D(2), IMAGE),
    "AdaptiveMaxPooling3D": case(lambda: layers.AdaptiveMaxPooling3D(2), T),
    "Add": case(layers.Add, L, L, call=_list),
    "Add of other ranks": case(layers.Add, L, (1, 4), call=_list),
    "AdditiveAttention": case(layers.AdditiveAttention, L, (3, 4), call=_list),
    "AlphaDropout": case(lambda: layers.AlphaDropout(0.5, seed=1), L),
    "Attention": case(lambda: layers.Attention(use_scale=True), L, (3, 4), call=_list),
    "Attention, causal": case(
        layers.Attention, L, L, call=lambda layer, q, v: layer([q, v], use_causal_mask=True)
    ),
    "Average": case(layers.Average, L, L, L, call=_list),
    "AveragePooling1D": case(lambda: layers.AveragePooling1D(2), L),
    "AveragePooling2D": case(lambda: layers.AveragePooling2D(2, padding="same"), IMAGE),
    "AveragePooling3D": case(lambda: layers.AveragePooling3D(2), T),
    "BatchNormalization": case(layers.BatchNormalization, L),
    "BatchNormalization of images": case(layers.BatchNormalization, IMAGE),
    "BatchNormalization of an axis": case(lambda: layers.BatchNormalization(axis=1), L),
    "Bidirectional": case(lambda: layers.Bidirectional(layers.LSTM(3, unroll=True)), L),
    "CategoryEncoding": case(
        lambda: layers.CategoryEncoding(num_tokens=5, output_mode="multi_hot"),
        (4,),
        draw=integers(5),
    ),
    "CategoryEncoding of counts": case(
        lambda: layers.CategoryEncoding(num_tokens=5, output_mode="count"), (4,), draw=integers(5)
    ),
    "CategoryEncoding, one hot": case(
        lambda: layers.CategoryEncoding(num_tokens=5, output_mode="one_hot"),
        (1,),
        draw=integers(5),
    ),
    "CenterCrop": case(lambda: layers.CenterCrop(3, 3), IMAGE),
    "Concatenate": case(layers.Concatenate, L, (5, 2), call=_list),
    "Conv1D": case(lambda: layers.Conv1D(3, 3, padding="causal"), L),
    "Conv1DTranspose": case(lambda: layers.Conv1DTranspose(3, 3, strides=2), L),
    "Conv2D": case(lambda: layers.Conv2D(4, 3, strides=2, padding="same"), IMAGE),
    "Conv2D, dilated": case(lambda: layers.Conv2D(4, 2, dilation_rate=2), IMAGE),
    "Conv2D, grouped": case(lambda: layers.Conv2D(6, 2, groups=3), IMAGE),
    "Conv2DTranspose": case(lambda: layers.Conv2DTranspose(2, 3, strides=2, padding="same"), IMAGE),
    "Conv3D": case(lambda: layers.Conv3D(3, 2), T),
    "Conv3DTranspose": case(lambda: layers.Conv3DTranspose(3, 2), T),
    "Cropping1D": case(lambda: layers.Cropping1D(1), L),
    "Cropping2D": case(lambda: layers.Cropping2D(1), IMAGE),
    "Cropping3D": case(lambda: layers.Cropping3D(1), T),
    "Dense": case(lambda: layers.Dense(3, activation="relu"), (6,)),
    "Dense of sequences": case(lambda: layers.Dense(3), L),
    "DepthwiseConv1D": case(lambda: layers.DepthwiseConv1D(2, depth_multiplier=2), L),
    "DepthwiseConv2D": case(lambda: layers.DepthwiseConv2D(3), IMAGE),
    "Discretization": case(lambda: layers.Discretization([-1.0, 0.0, 1.0]), L),
    "Discretization, one hot": case(
        lambda: layers.Discretization([-1.0, 0.0, 1.0], output_mode="one_hot"), (1,)
    ),
    "Dot": case(lambda: layers.Dot(axes=2, normalize=True), L, (3, 4), call=_list),
    "Dropout": case(lambda: layers.Dropout(0.5, seed=1), L),
    "Dropout of steps": case(lambda: layers.Dropout(0.5, noise_shape=(None, 1, 4), seed=1), L),
    "ELU": case(layers.ELU, L),
    "EinsumDense": case(
        lambda: layers.EinsumDense("abc,cde->abde", (None, 2, 3), bias_axes="de"), L
    ),
    "EinsumDense of heads": case(lambda: layers.EinsumDense("...x,xy->...y", 3), L),
    "Embedding": case(lambda: layers.Embedding(7, 3), (5,), draw=integers(7)),
    "Flatten": case(layers.Flatten, IMAGE),
    "GRUCell": case(lambda: layers.GRUCell(3), (4,), (3,), call=_cell(1)),
    "GRU": case(lambda: layers.GRU(3, unroll=True, return_sequences=True), L),
    "GaussianDropout": case(lambda: layers.GaussianDropout(0.3, seed=1), L),
    "GaussianNoise": case(lambda: layers.GaussianNoise(0.3, seed=1), L),
    "GlobalAveragePooling1D": case(layers.GlobalAveragePooling1D, L),
    "GlobalAveragePooling1D, masked": case(lambda: Masked(layers.GlobalAveragePooling1D()), L),
    "GlobalAveragePooling2D": case(layers.GlobalAveragePooling2D, IMAGE),
    "GlobalAveragePooling3D": case(layers.GlobalAveragePooling3D, T),
    "GlobalMaxPooling1D": case(layers.GlobalMaxPooling1D, L),
    "GlobalMaxPooling2D": case(layers.GlobalMaxPooling2D, IMAGE),
    "GlobalMaxPooling3D": case(layers.GlobalMaxPooling3D, T),
    "GroupNormalization": case(lambda: layers.GroupNormalization(2), (6, 6, 4)),
    "GroupQueryAttention": case(lambda: layers.GroupQueryAttention(4, 4, 2), L, (3, 4)),
    "HashedCrossing": case(
        lambda: layers.HashedCrossing(7),
        (1,),
        (1,),
        draw=words,
        call=_list,
        gathers=("SparseCross",),
    ),
    "Hashing": case(lambda: layers.Hashing(7), (3,), draw=words),
    "Identity": case(layers.Identity, L),
    "IntegerLookup": case(
        lambda: layers.IntegerLookup(vocabulary=[1, 2, 3]), (3,), draw=integers(6)
    ),
    "LSTMCell": case(lambda: layers.LSTMCell(3), (4,), (3,), (3,), call=_cell(2)),
    "LSTM": case(lambda: layers.LSTM(3, unroll=True), L),
    "Lambda": case(lambda: layers.Lambda(lambda x: x * 2 + keras.ops.mean(x)), L),
    "LayerNormalization": case(layers.LayerNormalization, L),
    "LayerNormalization of images": case(lambda: layers.LayerNormalization(axis=[1, 2, 3]), IMAGE),
    "LeakyReLU": case(layers.LeakyReLU, L),
    "Masking": case(layers.Masking, L),
    "MaxPooling1D": case(lambda: layers.MaxPooling1D(2), L),
    "MaxPooling2D": case(lambda: layers.MaxPooling2D(2, padding="same"), IMAGE),
    "MaxPooling3D": case(lambda: layers.MaxPooling3D(2), T),
    "Maximum": case(layers.Maximum, L, L, call=_list),
    "MelSpectrogram": case(
        lambda: layers.MelSpectrogram(
            fft_length=16, sequence_stride=8, sampling_rate=100, num_mel_bins=4
        ),
        (40,),
    ),
    "Minimum": case(layers.Minimum, L, L, call=_list),
    "MultiHeadAttention": case(lambda: layers.MultiHeadAttention(2, 3), L, (3, 4)),
    "MultiHeadAttention, causal": case(
        lambda: layers.MultiHeadAttention(2, 3),
        L,
        L,
        call=lambda layer, q, v: layer(q, v, use_causal_mask=True),
    ),
    "MultiHeadAttention, dropout": case(
        lambda: layers.MultiHeadAttention(2, 3, dropout=0.5, seed=1), L, (3, 4)
    ),
    "Multiply": case(layers.Multiply, L, L, call=_list),
    "Normalization": case(layers.Normalization, L, adapt=True),
    "PReLU": case(layers.PReLU, L),
    "Permute": case(lambda: layers.Permute((2, 1)), L),
    "RMSNormalization": case(layers.RMSNormalization, L),
    "RNN": case(lambda: layers.RNN(layers.GRUCell(3), unroll=True), L),
    "ReLU": case(lambda: layers.ReLU(6.0, 0.1, 0.2), L),
    "RepeatVector": case(lambda: layers.RepeatVector(3), (4,)),
    "Rescaling": case(lambda: layers.Rescaling(0.5, 1.0), L),
    "Reshape": case(lambda: layers.Reshape((-1, 2)), L),
    "Resizing": case(lambda: layers.Resizing(4, 5), IMAGE),
    "Resizing, nearest": case(lambda: layers.Resizing(9, 5, interpolation="nearest"), IMAGE),
    "Resizing, cropped": case(lambda: layers.Resizing(4, 5, crop_to_aspect_ratio=True), IMAGE),
    "Resizing, padded": case(lambda: layers.Resizing(4, 5, pad_to_aspect_ratio=True), IMAGE),
    "ReversibleEmbedding": case(lambda: layers.ReversibleEmbedding(7, 3), (5,), draw=integers(7)),
    "ReversibleEmbedding, reversed": case(
        lambda: layers.ReversibleEmbedding(7, 4), L, call=lambda layer, x: layer(x, reverse=True)
    ),
    "STFTSpectrogram": case(
        lambda: layers.STFTSpectrogram(frame_length=8, frame_step=4, fft_length=8), (40, 1)
    ),
    "SeparableConv1D": case(lambda: layers.SeparableConv1D(3, 2), L),
    "SeparableConv2D": case(lambda: layers.SeparableConv2D(3, 2), IMAGE),
    "SimpleRNNCell": case(lambda: layers.SimpleRNNCell(3), (4,), (3,), call=_cell(1)),
    "SimpleRNN": case(lambda: layers.SimpleRNN(3, unroll=True), L),
    "Softmax": case(layers.Softmax, L),
    "Softmax of an axis": case(lambda: layers.Softmax(axis=1), L),
    "SpatialDropout1D": case(lambda: layers.SpatialDropout1D(0.5, seed=1), L),
    "SpatialDropout2D": case(lambda: layers.SpatialDropout2D(0.5, seed=1), IMAGE),
    "SpatialDropout3D": case(lambda: layers.SpatialDropout3D(0.5, seed=1), T),
    "SpectralNormalization": case(lambda: layers.SpectralNormalization(layers.Dense(3)), (6,)),
    "StackedRNNCells": case(
        lambda: layers.RNN(
            layers.StackedRNNCells([layers.GRUCell(3), layers.LSTMCell(2)]), unroll=True
        ),
        L,
    ),
    "StringLookup": case(lambda: layers.StringLookup(vocabulary=["one", "two"]), (3,), draw=words),
    "StringLookup, multi hot": case(
        lambda: layers.StringLookup(vocabulary=["one", "two"], output_mode="multi_hot"),
        (3,),
        draw=words,
    ),
    "Subtract": case(layers.Subtract, L, L, call=_list),
    "TimeDistributed": case(lambda: layers.TimeDistributed(layers.Conv1D(2, 2)), (3, 5, 4)),
    "UnitNormalization": case(layers.UnitNormalization, L),
    "UpSampling1D": case(lambda: layers.UpSampling1D(2), L),
    "UpSampling2D": case(lambda: layers.UpSampling2D(2), IMAGE),
    "UpSampling2D, bilinear": case(lambda: layers.UpSampling2D(2, interpolation="bilinear"), IMAGE),
    "UpSampling3D": case(lambda: layers.UpSampling3D(2), T),
    "ZeroPadding1D": case(lambda: layers.ZeroPadding1D(1), L),
    "ZeroPadding2D": case(lambda: layers.ZeroPadding2D(1), IMAGE),
    "ZeroPadding3D": case(lambda: layers.ZeroPadding3D(1), T),
    "ConvLSTM1D": case(lambda: layers.ConvLSTM1D(2, 2, unroll=True), (2, 4, 3)),
    "ConvLSTM2D": case(lambda: layers.ConvLSTM2D(2, 2, unroll=True), (2, 4, 4, 3)),
    "ConvLSTM3D": case(lambda: layers.ConvLSTM3D(2, 2, unroll=True), (2, 3, 3, 3, 2)),
}

_NOISE = "draws numbers for each image, which tests of random numbers cover"
NO_CASE: dict[str, str] = {
    **dict.fromkeys(
        [
            "AugMix", "AutoContrast", "ContrastLimitedAdaptiveHistogramEqualization", "CutMix",
            "Equalization", "MaxNumBoundingBoxes", "MixUp", "Pipeline", "RandAugment",
            "RandomBrightness", "RandomColorDegeneration", "RandomColorJitter", "RandomContrast",
            "RandomCrop", "RandomElasticTransform", "RandomErasing", "RandomFlip",
            "RandomGaussianBlur", "RandomGrayscale", "RandomHue", "RandomInvert",
            "RandomPerspective", "RandomPosterization", "RandomRotation", "RandomSaturation",
            "RandomSharpness", "RandomShear", "RandomTranslation", "RandomZoom", "Solarization",
        ],
        _NOISE,
    ),
    **dict.fromkeys(["FlaxLayer", "JaxLayer", "TorchModuleWrapper"], "of other frameworks"),
    **dict.fromkeys(["InputLayer", "Layer", "Wrapper"], "computes nothing"),
    "TFSMLayer": "calls a saved function, which is partitioned like any other",
    "TextVectorization": "makes ragged tensors",
}  # fmt: skip


def _layers() -> list[str]:
    """Returns the names of the layers, one name for each class."""
    names: dict[Any, str] = {}
    for name, member in inspect.getmembers(layers, inspect.isclass):
        if issubclass(member, layers.Layer) and (member not in names or name == member.__name__):
            names[member] = name
    return sorted(names.values())


def test_every_layer_has_a_case_or_a_reason():
    covered = {name.partition(",")[0].partition(" of ")[0] for name in CASES}
    assert sorted(covered | set(NO_CASE)) == _layers()
    assert not covered & set(NO_CASE)


def draw(example: Case) -> list[Any]:
    rng = np.random.default_rng(0)
    normal = lambda rng, shape: rng.normal(size=shape).astype("float32")  # noqa: E731
    make = example.draw or normal
    return [make(rng, (_ROWS, *shape)) for shape in example.shapes]


def training_step(example: Case, inputs: list[Any]) -> Callable[..., Any]:
    """Returns a program without side effects: it computes results, state, losses and gradients."""
    keras.utils.set_random_seed(1)
    layer = example.make()
    call = example.call or (lambda layer, *x: layer(*x))
    if example.adapt:
        layer.adapt(inputs[0])

    class Called(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer
            self.built = True  # The layer itself is built when it is called.

        def call(self, *x: Any, training: bool | None = None) -> Any:
            return call(self.layer, *x)

    class Training(layers.Layer):
        """Passes on `training`, which `stateless_call` passes to the outermost layer only."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = Called()
            self.built = True

        def call(self, *x: Any, training: bool | None = None) -> Any:
            return self.layer(*x, training=training)

    called = Training()
    called(*map(tf.constant, inputs), training=False)
    differentiable = [x.dtype == np.float32 for x in inputs]

    def program(*x: Any) -> Any:
        weights = [tf.convert_to_tensor(v.value) for v in called.trainable_variables]
        state = [tf.convert_to_tensor(v.value) for v in called.non_trainable_variables]
        with tf.GradientTape() as tape:
            given = [x for x, use in zip(x, differentiable, strict=True) if use] + weights
            tape.watch(given)
            outputs, state, losses = called.stateless_call(
                weights, state, *x, training=True, return_losses=True
            )
            results = tf.nest.flatten(outputs)
            floating = [r for r in results if r.dtype.is_floating]
            loss = sum([tf.reduce_mean(tf.square(r + 0.1)) for r in floating], sum(losses))
        results += state
        if tf.is_tensor(loss):
            found = tape.gradient(loss, given)
            results += [loss, *(g for g in found if g is not None)]
        return [tf.convert_to_tensor(r) for r in results]

    return program


# Layers of different kinds, which the default tests train.
_DEFAULT = [
    "AdaptiveMaxPooling2D", "Add of other ranks", "Attention, causal", "BatchNormalization",
    "CategoryEncoding of counts", "Concatenate", "Conv1D", "Conv2D, dilated", "Conv2D, grouped",
    "Conv2DTranspose", "Dot", "Dropout of steps", "EinsumDense of heads", "Embedding",
    "GroupNormalization", "LSTMCell", "MultiHeadAttention", "STFTSpectrogram", "StringLookup",
    "UpSampling1D",
]  # fmt: skip
_SETTINGS = [(shares, static) for shares in SHARES for static in (False, True)]


def _cases() -> list[tuple[str, Any]]:
    return [(name, setting) for name in CASES for setting in _SETTINGS]


def _default_cases() -> list[tuple[str, Any]]:
    return [(name, _SETTINGS[i % len(_SETTINGS)]) for i, name in enumerate(_DEFAULT)]


@pytest.mark.parametrize(("name", "setting"), some(_cases(), always=_default_cases()))
def test_a_layer_trains_on_rows_as_on_the_whole_batch(name, setting):
    shares, static = setting
    example = CASES[name]
    inputs = draw(example)
    _, analysis = check(training_step(example, inputs), inputs, list(shares), static=static)
    assert sorted(set(gathers(analysis))) == sorted(example.gathers)


@exhaustive
@pytest.mark.parametrize("static", [False, True])
def test_a_layer_gathers_no_rows(static):
    found = {}
    for name, example in CASES.items():
        inputs = draw(example)
        concrete = trace(training_step(example, inputs), inputs, static=static)
        found[name] = tuple(sorted(set(gathers(analyze(concrete, inputs, static=static)))))
    assert found == {name: tuple(sorted(example.gathers)) for name, example in CASES.items()}
