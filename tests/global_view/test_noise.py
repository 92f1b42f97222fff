"""Random numbers: each row gets the same numbers as in the whole batch."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.global_view.simulation import analyze, check, gathers, trace
from tests.harness.tiers import some
from tfdist._src.global_view.rules.state import skip_ahead

SHARES = [[6, 5], [4, 4, 3], [11, 0]]
_RANDOM = np.random.default_rng(0)
X = _RANDOM.normal(size=(11, 4, 3)).astype("float32")
IMAGES = _RANDOM.uniform(size=(11, 8, 8, 3)).astype("float32")
_RANGE = {"value_range": (0, 1), "seed": 3}

# For each: the layer's options, its operand, and the types of the operations that gather rows.
LAYERS = {
    "Dropout": ({"rate": 0.4, "seed": 3}, X, ()),
    "GaussianNoise": ({"stddev": 0.4, "seed": 3}, X, ()),
    "GaussianDropout": ({"rate": 0.4, "seed": 3}, X, ()),
    "AlphaDropout": ({"rate": 0.4, "seed": 3}, X, ()),
    "SpatialDropout1D": ({"rate": 0.4, "seed": 3}, X, ()),
    "SpatialDropout2D": ({"rate": 0.4, "seed": 3}, IMAGES, ()),
    "RandomFlip": ({"seed": 3}, IMAGES, ()),
    "RandomRotation": ({"factor": 0.2, "seed": 3}, IMAGES, ()),
    "RandomTranslation": ({"height_factor": 0.2, "width_factor": 0.2, "seed": 3}, IMAGES, ()),
    "RandomZoom": ({"height_factor": 0.2, "seed": 3}, IMAGES, ()),
    "RandomContrast": ({"factor": 0.2, **_RANGE}, IMAGES, ()),
    "RandomBrightness": ({"factor": 0.2, **_RANGE}, IMAGES, ()),
    "RandomCrop": ({"height": 5, "width": 5, "seed": 3}, IMAGES, ()),
    "RandomShear": ({"x_factor": 0.2, "seed": 3}, IMAGES, ()),
    "RandomHue": ({"factor": 0.3, **_RANGE}, IMAGES, ()),
    "RandomSaturation": ({"factor": 0.3, **_RANGE}, IMAGES, ()),
    "RandomGrayscale": ({"factor": 0.3, "seed": 3}, IMAGES, ()),
    "RandomColorJitter": (_RANGE, IMAGES, ()),
    "RandomErasing": ({"factor": 0.3, **_RANGE}, IMAGES, ()),
    "RandomGaussianBlur": ({"factor": 0.3, **_RANGE}, IMAGES, ()),
    "RandomSharpness": ({"factor": 0.3, **_RANGE}, IMAGES, ()),
    "RandomInvert": ({"factor": 0.3, **_RANGE}, IMAGES, ()),
    "RandomPosterization": ({"factor": 3, **_RANGE}, IMAGES, ()),
    "RandomColorDegeneration": ({"factor": 0.3, **_RANGE}, IMAGES, ()),
    "RandomPerspective": ({"factor": 0.3, "seed": 3}, IMAGES, ()),
    "RandAugment": (_RANGE, IMAGES, ()),
    "AugMix": (_RANGE, IMAGES, ()),
    # It loops over the rows, whether their number is known or not.
    "RandomElasticTransform": ({"factor": 0.3, **_RANGE}, IMAGES, ("StridedSlice",)),
    # They mix each image with another one.
    "MixUp": ({"seed": 3}, IMAGES, ("GatherV2", "StatelessRandomGammaV3")),
    "CutMix": ({"seed": 3}, IMAGES, ("GatherV2", "StatelessRandomGammaV3")),
}


@pytest.mark.parametrize("static", some([False, True], always=[False]))
@pytest.mark.parametrize("shares", some(SHARES, always=[[4, 4, 3]]))
@pytest.mark.parametrize(
    "name",
    some(LAYERS, always=["Dropout", "GaussianNoise", "SpatialDropout1D", "RandomFlip", "MixUp"]),
)
def test_each_row_gets_the_noise_of_the_whole_batch_in_layers(name, shares, static):
    if not hasattr(layers, name):
        pytest.skip(f"Keras has no {name}")
    options, operand, coupled = LAYERS[name]
    layer = getattr(layers, name)(**options)
    layer(operand[:2], training=True)
    _, analysis = check(
        lambda x: tf.nest.flatten(layer(x, training=True)), [operand], shares, static=static
    )
    assert set(gathers(analysis)) <= set(coupled)


_keras = keras.random
_tf = tf.random

# For each: a function of rows, their number and a seed; and the types of the operations that gather
# rows. Operations that draw numbers with parameters of each row draw them for all rows.
DRAWS = {
    "uniform": (lambda x, n, seed: _keras.uniform((n, 5), seed=seed), ()),
    "normal": (lambda x, n, seed: _keras.normal((n, 5), seed=seed) + x[:, 0, :1], ()),
    "odd": (lambda x, n, seed: _keras.normal((n, 3), seed=seed), ()),
    "vector": (lambda x, n, seed: _keras.normal((n,), seed=seed) + x[:, 0, 0], ()),
    "flat": (lambda x, n, seed: ops.reshape(_keras.normal((n * 3,), seed=seed), (n, 3)), ()),
    "double": (lambda x, n, seed: _keras.uniform((n, 5), seed=seed, dtype="float64"), ()),
    "bfloat16": (lambda x, n, seed: _keras.uniform((n, 5), seed=seed, dtype="bfloat16"), ()),
    "randint": (lambda x, n, seed: _keras.randint((n, 5), 0, 9, seed=seed), ()),
    "other axis": (lambda x, n, seed: _keras.normal((3, n), seed=seed) @ x[:, 0], ()),
    "truncated": (lambda x, n, seed: _keras.truncated_normal((n, 5), seed=seed), ()),
    "gamma": (lambda x, n, seed: _keras.gamma((n, 5), 2.0, seed=seed), ()),
    "beta": (
        lambda x, n, seed: _keras.beta((n, 5), 2.0, 1.0, seed=seed),
        ("StatelessRandomGammaV3",),
    ),
    "binomial": (lambda x, n, seed: _keras.binomial((n, 5), 4.0, 0.3, seed=seed), ()),
    "categorical": (
        lambda x, n, seed: _keras.categorical(x[:, 0], 2, seed=seed),
        ("StatelessMultinomial",),
    ),
    "shuffle": (lambda x, n, seed: _keras.shuffle(x, seed=seed), ("GatherV2", "TopKV2")),
    "shuffled axis": (lambda x, n, seed: _keras.shuffle(x, axis=1, seed=seed), ()),
    "tf uniform": (lambda x, n, seed: _tf.stateless_uniform([n, 3], [1, 2]) + x[:, 0], ()),
    "tf normal": (lambda x, n, seed: _tf.stateless_normal([n, 3], [1, 2]), ()),
    "tf int": (lambda x, n, seed: _tf.stateless_uniform([n, 3], [1, 2], 0, 9, tf.int32), ()),
    "tf long": (lambda x, n, seed: _tf.stateless_uniform([n, 3], [1, 2], 0, 9, tf.int64), ()),
    "tf full": (
        lambda x, n, seed: _tf.stateless_uniform([n, 3], [1, 2], None, None, tf.int32),
        (),
    ),
    "tf truncated": (lambda x, n, seed: _tf.stateless_truncated_normal([n, 3], [1, 2]), ()),
    "tf binomial": (lambda x, n, seed: _tf.stateless_binomial([n, 3], [1, 2], 5.0, 0.4), ()),
    "tf gamma": (lambda x, n, seed: _tf.stateless_gamma([n, 3], [1, 2], 2.0), ()),
    "tf poisson": (lambda x, n, seed: _tf.stateless_poisson([n, 3], [1, 2], 2.0), ()),
    "tf gamma of rows": (
        lambda x, n, seed: _tf.stateless_gamma([n, 3], [1, 2], tf.abs(x[:, 0]) + 1.0),
        ("StatelessRandomGammaV3",),
    ),
    "tf seeded": (lambda x, n, seed: _tf.uniform([n, 3], seed=4) + x[:, 0], ()),
    "tf seeded shuffle": (lambda x, n, seed: _tf.shuffle(x, seed=4), ("RandomShuffle",)),
}


def _program(name):
    draw, _ = DRAWS[name]
    seed = keras.random.SeedGenerator(5)
    return lambda x: [draw(x, ops.shape(x)[0], seed)]


@pytest.mark.parametrize("static", some([False, True], always=[False]))
@pytest.mark.parametrize("shares", some(SHARES, always=[[4, 4, 3]]))
@pytest.mark.parametrize("name", some(DRAWS, always=[*DRAWS][::3]))
def test_each_row_gets_its_numbers(name, shares, static):
    _, analysis = check(_program(name), [X], shares, static=static)
    assert set(gathers(analysis)) <= set(DRAWS[name][1])


@pytest.mark.parametrize(
    "name",
    ["uniform", "normal", "odd", "vector", "flat", "double", "bfloat16", "randint", "tf int"],
)
def test_numbers_of_other_rows_are_skipped(name):
    analysis = analyze(trace(_program(name), [X]), [X])
    draws = [op for op in analysis.operations if op.type.startswith("StatelessRandom")]
    draws = [op for op in draws if "Key" not in op.type and "Alg" not in op.type]
    drawn = [analysis.decisions[op] for op in draws]
    assert [d.emit for d in drawn if d.outputs[0].kind == "rows"] == [skip_ahead]


def test_generators_advance_equally():
    generator = tf.random.Generator.from_seed(7)
    check(lambda x: [generator.uniform([tf.shape(x)[0], 3]) + x[:, 0]], [X], [6, 5], steps=3)


def test_a_global_seed():
    tf.random.set_seed(5)
    check(lambda x: [tf.random.normal([tf.shape(x)[0], 3]) + x[:, 0]], [X], [4, 7, 0], steps=2)


def test_numbers_without_a_seed_are_the_same_on_all_workers():
    def program(x):
        noise = tf.raw_ops.RandomUniform(shape=tf.shape(x), dtype=tf.float32)
        return [tf.cast(noise < 2.0, tf.float32) * x, tf.reduce_sum(noise) * 0.0]

    check(program, [X], [4, 7, 0])
