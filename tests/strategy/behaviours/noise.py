"""Noise of every distribution, for rows and for weights, and functions that are traced by hand."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.strategy.behaviours.common import batches, fit, outcome, rows, scope


class _EveryDistribution(keras.layers.Layer):
    """Appends numbers of each distribution, with parameters for all rows and for each row."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(3)

    def call(self, x):
        random, seed = keras.random, self.seed
        count = keras.ops.shape(x)[0]
        positive = 0.2 + keras.ops.square(x[:, :3])
        numbers = [
            random.normal((count, 3), seed=seed),
            random.uniform((count, 3), seed=seed),
            random.randint((count, 3), 0, 9, seed=seed),
            random.truncated_normal((count, 3), mean=1.0, seed=seed),
            random.gamma((count, 3), 0.7, seed=seed),
            random.gamma((count, 3), positive, seed=seed),
            random.beta((count, 3), 0.3, 0.4, seed=seed),
            random.beta((count, 3), positive, positive + 1, seed=seed),
            random.binomial((count, 3), 7.0, 0.4, seed=seed),
            random.binomial((count, 3), 7.0, keras.ops.sigmoid(x[:, :3]), seed=seed),
            random.categorical(x, 3, seed=seed),
            keras.ops.reshape(random.truncated_normal((count * 3, 1), seed=seed), (-1, 3)),
        ]
        numbers = [keras.ops.cast(n, "float32") for n in numbers]
        return keras.ops.stop_gradient(keras.ops.concatenate([x, *numbers], axis=1))

    def compute_output_shape(self, shape):
        return (shape[0], shape[1] + 36)


def every_distribution(strategy):
    x, y = rows(11)
    with scope(strategy):
        model = keras.Sequential([keras.Input((8,)), _EveryDistribution(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    return outcome(model, fit(model, x, y, batch_size=7, shuffle=False))


def batches_of_a_fixed_size(strategy):
    """Noise for their rows; and on a kernel, whose first dimension the size divides."""

    class Perturbed(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.kernel = self.add_weight(shape=(8, 3))
            self.seed = keras.random.SeedGenerator(3)

        def call(self, x):
            noise = keras.random.truncated_normal(keras.ops.shape(x), seed=self.seed)
            return (x + noise) @ (self.kernel + keras.random.normal((8, 3), seed=self.seed))

    x, y = rows(16)
    with scope(strategy):
        layers = [keras.layers.Dropout(0.5, seed=1), keras.layers.GaussianNoise(0.3, seed=2)]
        model = keras.Sequential([keras.Input((8,)), *layers, Perturbed()])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8, drop_remainder=True)
    return outcome(model, fit(model, data))


def mixed_rows(strategy):
    """MixUp and CutMix, which shuffle the rows, inside a `train_step` and inside a model."""

    class Mixing(keras.Model):
        def train_step(self, data):
            images, labels = data
            mixed = mix_up({"images": images, "labels": labels}, training=True)
            return super().train_step((mixed["images"], mixed["labels"]))

    images = np.random.default_rng(0).random((11, 6, 6, 1)).astype("float32")
    labels = np.eye(3, dtype="float32")[np.arange(11) % 3]
    with scope(strategy):
        mix_up = keras.layers.MixUp(alpha=0.4, seed=1)
        inputs = keras.Input((6, 6, 1))
        # The oldest Keras has no CutMix.
        mix = getattr(keras.layers, "CutMix", keras.layers.MixUp)(seed=2)
        hidden = keras.layers.Flatten()(mix(inputs))
        model = Mixing(inputs, keras.layers.Dense(3, activation="softmax")(hidden))
        model.compile("sgd", "categorical_crossentropy")
    history = fit(model, images, labels, batch_size=7, shuffle=False)
    evaluated = model.evaluate(images, labels, batch_size=7, verbose=0)
    return outcome(model, history, evaluated=evaluated)


def mixed_after_a_layer(strategy):
    """Gradients flow to the rows of other replicas."""
    generator = np.random.default_rng(0)
    with scope(strategy):
        inputs = keras.Input((6, 6, 1))
        mixed = keras.layers.MixUp(seed=1)(keras.layers.Conv2D(1, 1)(inputs))
        model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Flatten()(mixed)))
        model.compile("sgd", "mse")
    images = generator.random((11, 6, 6, 1)).astype("float32")
    return outcome(model, fit(model, images, generator.random((11, 3)), batch_size=7))


def shuffles(strategy):
    """Shuffles the rows of a batch, and the features of each row alike."""
    losses = {}
    for axis in (0, 1):

        class Shuffled(keras.layers.Layer):
            def call(self, x, axis=axis):
                return keras.random.shuffle(x, axis=axis, seed=4)

        with scope(strategy):
            model = keras.Sequential([keras.Input((8,)), Shuffled(), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        losses[axis] = fit(model, *rows(11), batch_size=7)["loss"]
    return losses


def functions_traced_before_the_step(strategy, eagerly):
    """A layer and a loss by `tf.function`, which a loop by hand has called before `fit`."""

    class Noisy(keras.layers.Layer):
        @tf.function
        def call(self, x):
            return x + keras.random.normal(tf.shape(x), seed=3)

    summed = keras.losses.MeanSquaredError(reduction="sum")

    @tf.function
    def loss(y_true, y_pred):
        return summed(y_true, y_pred)

    x, y = rows(11)
    y = y[:, None].astype("float32")
    with scope(strategy):
        model = keras.Sequential([keras.Input((8,)), Noisy(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), loss, run_eagerly=eagerly)

    def by_hand():
        loss(tf.zeros([3, 1]), model(tf.ones([3, 8]), training=True))

    strategy.run(by_hand) if strategy else by_hand()
    data = {"validation_data": batches(x, y, 7)}
    return outcome(model, fit(model, batches(x, y, 7), **data))


def state_of_other_types(strategy):
    """What is no floating-point number is alike on all replicas after a step."""

    class Counts(keras.layers.Layer):
        def build(self, shape):
            self.seen = self.add_weight(
                shape=(), dtype="bool", initializer="zeros", trainable=False
            )
            self.spectrum = tf.Variable(tf.zeros([8], tf.complex64), trainable=False)

        def call(self, x):
            self.seen.assign(keras.ops.any(x[0] > 0))
            self.spectrum.assign(tf.signal.fft(tf.cast(tf.reduce_mean(x, 0), tf.complex64)))
            return x

    x, y = rows(7)
    with scope(strategy):
        layer = Counts()
        model = keras.Sequential([keras.Input((8,)), layer, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    history = fit(model, x, y, batch_size=7, shuffle=False)
    spectrum = layer.spectrum.numpy()
    return outcome(
        model, history, seen=bool(layer.seen.numpy()), spectrum=[spectrum.real, spectrum.imag]
    )


def without_seeds(strategy):
    """What no seed determines: operations without one, and Python's own numbers."""
    draws = np.random.default_rng()

    class Unseeded(keras.layers.Layer):
        def call(self, x):
            drawn = tf.numpy_function(lambda: draws.random(3, "float32"), [], tf.float32)
            sampled = tf.raw_ops.LogUniformCandidateSampler(
                true_classes=tf.zeros([1, 1], tf.int64),
                num_true=1,
                num_sampled=3,
                unique=True,
                range_max=1000,
            ).sampled_candidates
            counts = tf.raw_ops.NonDeterministicInts(shape=[3], dtype=tf.int64) % 100
            pooled = tf.nn.fractional_max_pool(x[:, :, None, None], [1.0, 1.5, 1.0, 1.0])[0]
            noise = drawn + tf.cast(sampled + counts, tf.float32) / 1000
            return tf.concat([x[:, :3] + noise, tf.reshape(pooled, [-1, 5])], axis=1)

        def compute_output_shape(self, shape):
            return (shape[0], 8)

    x, y = rows(11)
    with scope(strategy):
        model = keras.Sequential([keras.Input((8,)), Unseeded(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    return outcome(model, fit(model, x, y, batch_size=7))
