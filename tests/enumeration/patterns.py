"""Losses, metrics, layers and training steps as people publish them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.enumeration.training import (
    BATCH,
    ROWS,
    Program,
    Training,
    adam,
    fractions,
    integers,
    numbers,
    row_weights,
)

PROGRAMS: dict[str, Program] = {}


def pattern(create: Callable[[], Program]) -> Callable[[], Program]:
    """Registers the program that a function creates, under the function's name."""
    PROGRAMS[create.__name__] = create()
    return create


def perceptron(
    outputs: int = 3,
    activation: str | None = None,
    features: int = 4,
    cls: Callable[..., keras.Model] = keras.Model,
) -> keras.Model:
    inputs = keras.Input((features,))
    hidden = layers.Dense(5, activation="tanh")(inputs)
    return cls(inputs, layers.Dense(outputs, activation=activation)(hidden))


def by_loss(
    loss: Any,
    y: Callable[[], Any] = lambda: numbers(ROWS, 3, seed=3),
    outputs: int = 3,
    activation: str | None = None,
    weighted: bool = False,
    **settings: Any,
) -> Training:
    """A perceptron that is trained with a loss."""
    return Training(
        lambda: perceptron(outputs, activation),
        lambda: (numbers(ROWS, 4), y(), *([row_weights()] if weighted else [])),
        lambda: {"optimizer": adam(), "loss": loss, **settings},
    )


def by_step(cls: Callable[..., keras.Model], *data: Any, **settings: Any) -> Training:
    """A model that computes its own steps."""
    settings.setdefault("steps", ())
    return Training(cls, lambda: data, lambda: {"optimizer": adam()}, **settings)


def by_scalar_step(cls: Callable[..., keras.Model]) -> Training:
    """A model that computes its own steps, with one target for each row."""
    return by_step(cls, numbers(ROWS, 4), numbers(ROWS, 1, seed=1))


def one_hot(classes: int = 3, count: int = ROWS, seed: int = 0) -> np.ndarray:
    return np.eye(classes, dtype="float32")[integers(classes, count, seed=seed)]


def masks(*shape: int) -> np.ndarray:
    return (fractions(*shape, seed=7) > 0.35).astype("float32")


def distances(x: Any) -> Any:
    """The squared distances between all rows."""
    squares = ops.sum(ops.square(x), axis=1)
    products = ops.matmul(x, ops.transpose(x))
    return ops.maximum(squares[:, None] - 2 * products + squares[None], 0.0)


def normalized(x: Any) -> Any:
    return x / ops.sqrt(ops.sum(ops.square(x), axis=-1, keepdims=True) + 1e-6)


# Regression.


@pattern
def rmse() -> Training:
    return by_loss(lambda y, p: ops.sqrt(ops.mean(ops.square(y - p))))


@pattern
def rmse_in_tensorflow() -> Training:
    return by_loss(lambda y, p: tf.sqrt(tf.reduce_mean(tf.square(y - p))))


@pattern
def rmse_of_rows() -> Training:
    return by_loss(lambda y, p: ops.sqrt(ops.mean(ops.square(y - p), axis=-1)), weighted=True)


@pattern
def rmse_of_columns() -> Training:
    """The mean of the columns' errors, as in competitions."""
    return by_loss(lambda y, p: ops.mean(ops.sqrt(ops.mean(ops.square(y - p), axis=0))))


@pattern
def log_rmse() -> Training:
    def loss(y, p):
        return ops.sqrt(ops.mean(ops.square(ops.log1p(y) - ops.log1p(ops.relu(p)))))

    return by_loss(loss, lambda: fractions(ROWS, 3), activation="softplus")


@pattern
def r2_loss() -> Training:
    def loss(y, p):
        residual = ops.sum(ops.square(y - p))
        return residual / (ops.sum(ops.square(y - ops.mean(y))) + 1e-7)

    return by_loss(loss)


@pattern
def pearson_loss() -> Training:
    def loss(y, p):
        y, p = y - ops.mean(y, axis=0), p - ops.mean(p, axis=0)
        product = ops.sum(y * p, axis=0)
        norms = ops.sqrt(ops.sum(y * y, axis=0) * ops.sum(p * p, axis=0) + 1e-6)
        return 1 - ops.mean(product / norms)

    return by_loss(loss)


@pattern
def concordance_loss() -> Training:
    def loss(y, p):
        covariance = ops.mean((y - ops.mean(y)) * (p - ops.mean(p)))
        spread = ops.var(y) + ops.var(p) + ops.square(ops.mean(y) - ops.mean(p))
        return 1 - 2 * covariance / (spread + 1e-6)

    return by_loss(loss)


@pattern
def pinball() -> Training:
    quantiles = np.array([0.1, 0.5, 0.9], "float32")

    def loss(y, p):
        return ops.mean(ops.maximum(quantiles * (y - p), (quantiles - 1) * (y - p)))

    return by_loss(loss)


@pattern
def scaled_error_of_series() -> Training:
    """MASE: errors relative to those of the last value, over the whole batch."""

    def loss(y, p):
        naive = ops.mean(ops.abs(y[:, 1:] - y[:, :-1]))
        return ops.mean(ops.abs(y - p)) / (naive + 1e-6)

    return by_loss(loss)


@pattern
def weighted_absolute_percentage_error() -> Training:
    return by_loss(lambda y, p: ops.sum(ops.abs(y - p)) / ops.sum(ops.abs(y)))


@pattern
def symmetric_percentage_error() -> Training:
    return by_loss(lambda y, p: 2 * ops.abs(y - p) / (ops.abs(y) + ops.abs(p) + 0.1))


@pattern
def gaussian_likelihood() -> Training:
    def loss(y, p):
        mean, log_variance = ops.split(p, 2, axis=-1)
        return ops.mean(0.5 * (log_variance + ops.square(y - mean) * ops.exp(-log_variance)))

    return by_loss(loss, outputs=6)


@pattern
def missing_targets() -> Training:
    """Targets of NaN do not count."""

    def targets():
        y = numbers(ROWS, 3, seed=3)
        y[masks(ROWS, 3) == 0] = np.nan
        return y

    def loss(y, p):
        valid = ops.logical_not(ops.isnan(y))
        errors = ops.where(valid, ops.square(ops.where(valid, y, 0.0) - p), 0.0)
        return ops.sum(errors) / ops.sum(ops.cast(valid, "float32"))

    return by_loss(loss, targets)


@pattern
def masked_mean() -> Training:
    def loss(y, p):
        y, mask = y[:, :3], y[:, 3:]
        return ops.sum(ops.square(y - p) * mask) / ops.sum(mask)

    return by_loss(loss, lambda: np.concatenate([numbers(ROWS, 3), masks(ROWS, 3)], axis=1))


@pattern
def boolean_mask() -> Training:
    """The mean of the values that `tf.boolean_mask` keeps."""

    def loss(y, p):
        kept = y > -0.3
        return tf.reduce_mean(tf.square(tf.boolean_mask(y, kept) - tf.boolean_mask(p, kept)))

    return by_loss(loss)


@pattern
def hardest_rows() -> Training:
    """Online hard example mining: the mean of the five largest losses of a batch."""

    def loss(y, p):
        rows = ops.mean(ops.square(y - p), axis=-1)
        return ops.mean(ops.top_k(rows, 5)[0])

    return by_loss(loss)


@pattern
def standardized_targets() -> Training:
    """The loss standardizes targets by their mean and deviation in the batch."""

    def loss(y, p):
        y = (y - ops.mean(y, axis=0)) / (ops.std(y, axis=0) + 1e-3)
        return ops.mean(ops.square(y - p))

    return by_loss(loss)


# Classification and segmentation.


def _binary_targets() -> np.ndarray:
    return integers(2, ROWS, 3).astype("float32")


@pattern
def dice() -> Training:
    def loss(y, p):
        y, p = ops.reshape(y, (-1,)), ops.reshape(p, (-1,))
        return 1 - (2 * ops.sum(y * p) + 1) / (ops.sum(y) + ops.sum(p) + 1)

    return by_loss(loss, _binary_targets, activation="sigmoid", metrics=[lambda y, p: -loss(y, p)])


@pattern
def jaccard() -> Training:
    def loss(y, p):
        both = ops.sum(y * p)
        return (1 - (both + 100) / (ops.sum(y) + ops.sum(p) - both + 100)) * 100

    return by_loss(loss, _binary_targets, activation="sigmoid")


@pattern
def tversky() -> Training:
    def loss(y, p):
        tp = ops.sum(y * p, axis=0)
        fp, fn = ops.sum((1 - y) * p, axis=0), ops.sum(y * (1 - p), axis=0)
        return ops.sum((1 - (tp + 1) / (tp + 0.3 * fp + 0.7 * fn + 1)) ** 0.75)

    return by_loss(loss, _binary_targets, activation="sigmoid")


@pattern
def dice_and_cross_entropy() -> Training:
    def loss(y, p):
        both = 2 * ops.sum(y * p) / (ops.sum(y) + ops.sum(p) + 1e-6)
        return keras.losses.binary_crossentropy(y, p) + 1 - both

    return by_loss(loss, _binary_targets, activation="sigmoid")


@pattern
def soft_f1() -> Training:
    def loss(y, p):
        tp = ops.sum(y * p, axis=0)
        fp, fn = ops.sum((1 - y) * p, axis=0), ops.sum(y * (1 - p), axis=0)
        return 1 - ops.mean(2 * tp / (2 * tp + fn + fp + 1e-6))

    return by_loss(loss, _binary_targets, activation="sigmoid")


@pattern
def focal() -> Training:
    def loss(y, p):
        p = ops.clip(p, 1e-6, 1 - 1e-6)
        right = ops.where(ops.equal(y, 1), p, 1 - p)
        return -ops.mean(0.25 * (1 - right) ** 2 * ops.log(right))

    return by_loss(loss, _binary_targets, activation="sigmoid")


@pattern
def focal_by_positives() -> Training:
    """As in RetinaNet: the sum over a batch, divided by its number of positives."""

    def loss(y, p):
        p = ops.clip(p, 1e-6, 1 - 1e-6)
        right = ops.where(ops.equal(y, 1), p, 1 - p)
        total = ops.sum(-((1 - right) ** 2) * ops.log(right))
        return total / ops.maximum(1.0, ops.sum(y))

    return by_loss(loss, _binary_targets, activation="sigmoid")


@pattern
def class_weights_of_the_batch() -> Training:
    def loss(y, p):
        counts = ops.sum(y, axis=0)
        weights = ops.sum(counts) / (3 * (counts + 1))
        rows = keras.losses.categorical_crossentropy(y, p, from_logits=True)
        return rows * ops.sum(y * weights, axis=-1)

    return by_loss(loss, one_hot)


@pattern
def balanced_cross_entropy() -> Training:
    def loss(y, p):
        beta = 1 - ops.mean(y)
        entropy = ops.softplus(p) - y * p
        return ops.mean(entropy * (y * beta + (1 - y) * (1 - beta)))

    return by_loss(loss, _binary_targets)


@pattern
def label_smoothing() -> Training:
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    return by_loss(loss, one_hot, metrics=["accuracy"])


@pattern
def unreduced_by_the_global_batch() -> Training:
    """As in TensorFlow's guides: rows' losses, summed and divided by a constant."""

    def loss(y, p):
        rows = keras.losses.categorical_crossentropy(y, p, from_logits=True)
        return ops.sum(rows) / BATCH

    return by_loss(loss, one_hot)


@pattern
def average_loss() -> Training:
    def loss(y, p):
        rows = tf.keras.losses.categorical_crossentropy(y, p, from_logits=True)
        return tf.nn.compute_average_loss(rows, global_batch_size=BATCH)

    return by_loss(loss, one_hot)


def _pixels(loss: Any, **settings: Any) -> Training:
    def model() -> keras.Model:
        inputs = keras.Input((4, 4, 2))
        x = layers.Conv2D(3, 3, padding="same", activation="relu")(inputs)
        return keras.Model(inputs, layers.Conv2D(3, 1)(x))

    return Training(
        model,
        lambda: (numbers(ROWS, 4, 4, 2), integers(4, ROWS, 4, 4)),
        lambda: {"optimizer": adam(), "loss": loss, **settings},
    )


@pattern
def ignored_pixels() -> Training:
    """Class 3 does not count: the sum is divided by the number of other pixels."""

    def loss(y, p):
        valid = ops.cast(ops.not_equal(y, 3), "float32")
        y = ops.where(ops.equal(y, 3), 0, y)
        pixels = keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True)
        return ops.sum(pixels * valid) / ops.sum(valid)

    return _pixels(loss)


@pattern
def ignored_class_of_keras() -> Training:
    return _pixels(keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=3))


@pattern
def segments_of_rows() -> Training:
    """Sums of the rows of each class, by `segment_sum`."""

    def loss(y, p):
        y = ops.cast(ops.reshape(y, (-1,)), "int32")
        centers = ops.segment_sum(p, y, num_segments=3)
        counts = ops.segment_sum(ops.ones_like(p[:, :1]), y, num_segments=3)
        centers = centers / ops.maximum(counts, 1.0)
        return ops.mean(ops.square(p - ops.take(centers, y, axis=0))) + 0.1 * ops.mean(p**2)

    return by_loss(loss, lambda: integers(3, ROWS))


@pattern
def ctc() -> Training:
    def model() -> keras.Model:
        inputs = keras.Input((6, 3))
        return keras.Model(inputs, layers.Dense(5)(layers.Conv1D(4, 2, padding="same")(inputs)))

    return Training(
        model,
        lambda: (numbers(ROWS, 6, 3), integers(5, ROWS, 2, low=1)),
        lambda: {"optimizer": adam(), "loss": keras.losses.CTC()},
    )


@pattern
def ctc_in_tensorflow() -> Training:
    def model() -> keras.Model:
        inputs = keras.Input((6, 3))
        return keras.Model(inputs, layers.Dense(5)(inputs))

    def loss(y, p):
        rows = tf.shape(p)[0]
        y = tf.cast(y, tf.int32)
        lengths = tf.fill([rows], tf.shape(y)[1]), tf.fill([rows], tf.shape(p)[1])
        return tf.nn.ctc_loss(y, p, *lengths, logits_time_major=False, blank_index=0)

    return Training(
        model,
        lambda: (numbers(ROWS, 6, 3), integers(5, ROWS, 2, low=1)),
        lambda: {"optimizer": adam(), "loss": loss},
    )


# Ranking.


@pattern
def list_net() -> Training:
    def loss(y, p):
        return -ops.sum(ops.softmax(y) * ops.log_softmax(p), axis=-1)

    return by_loss(loss, weighted=True)


@pattern
def list_net_over_the_batch() -> Training:
    """The batch is one list."""

    def loss(y, p):
        y, p = ops.reshape(y, (-1,)), ops.reshape(p, (-1,))
        return -ops.sum(ops.softmax(y) * ops.log_softmax(p))

    return by_loss(loss)


@pattern
def pairwise_ranking() -> Training:
    def loss(y, p):
        y, p = y[:, 0], p[:, 0]
        better = ops.cast(y[:, None] > y[None], "float32")
        return ops.sum(better * ops.softplus(p[None] - p[:, None])) / (ops.sum(better) + 1e-6)

    return by_loss(loss)


@pattern
def cox_likelihood() -> Training:
    """Survival: each event is compared with all rows that are still at risk."""

    def loss(y, p):
        times, events, risk = y[:, 0], ops.cast(y[:, 1] > 0, "float32"), p[:, 0]
        at_risk = ops.cast(times[None] >= times[:, None], "float32")
        total = ops.log(ops.sum(ops.exp(risk)[None] * at_risk, axis=1))
        return -ops.sum((risk - total) * events) / ops.maximum(1.0, ops.sum(events))

    return by_loss(loss)


# Deep metric learning.


@pattern
def semi_hard_triplets() -> Training:
    def loss(y, p):
        y = ops.reshape(y, (-1, 1))
        p = normalized(p)
        d = distances(p)
        same = ops.cast(ops.equal(y, ops.transpose(y)), "float32")
        other = 1 - same
        positive, negative = d[:, :, None], d[:, None, :]
        semi = (negative > positive) & (negative < positive + 0.5)
        valid = same[:, :, None] * other[:, None, :] * ops.cast(semi, "float32")
        return ops.sum(ops.relu(positive - negative + 0.5) * valid) / (ops.sum(valid) + 1e-6)

    return by_loss(loss, lambda: integers(3, ROWS))


@pattern
def batch_hard_triplets() -> Training:
    def loss(y, p):
        y = ops.reshape(y, (-1, 1))
        d = distances(p)
        same = ops.cast(ops.equal(y, ops.transpose(y)), "float32")
        furthest = ops.max(d * same, axis=1)
        nearest = ops.min(d + 1e3 * same, axis=1)
        return ops.relu(furthest - nearest + 1.0)

    return by_loss(loss, lambda: integers(3, ROWS))


@pattern
def supervised_contrastive() -> Training:
    def loss(y, p):
        y = ops.reshape(y, (-1, 1))
        p = normalized(p)
        logits = ops.matmul(p, ops.transpose(p)) / 0.5
        others = 1 - ops.eye(ops.shape(p)[0])
        same = ops.cast(ops.equal(y, ops.transpose(y)), "float32") * others
        log = logits - ops.log(ops.sum(ops.exp(logits) * others, axis=1, keepdims=True))
        return -ops.sum(same * log, axis=1) / (ops.sum(same, axis=1) + 1e-6)

    return by_loss(loss, lambda: integers(3, ROWS))


@pattern
def n_pairs() -> Training:
    def loss(y, p):
        same = ops.cast(ops.equal(ops.reshape(y, (-1, 1)), ops.reshape(y, (1, -1))), "float32")
        similar = ops.matmul(p, ops.transpose(p))
        targets = same / ops.sum(same, axis=1, keepdims=True)
        return keras.losses.categorical_crossentropy(targets, similar, from_logits=True)

    return by_loss(loss, lambda: integers(3, ROWS))


def _two_towers(add: Callable[..., Any], cls: Callable[..., keras.Model] = keras.Model) -> Training:
    """Two encoders, and a function of their outputs that returns the loss."""

    class Adding(layers.Layer):
        def call(self, a, b):
            self.add_loss(add(a, b))
            return a

    def model() -> keras.Model:
        x = {"a": keras.Input((4,), name="a"), "b": keras.Input((5,), name="b")}
        return cls(x, Adding()(layers.Dense(3)(x["a"]), layers.Dense(3)(x["b"])))

    return Training(
        model,
        lambda: ({"a": numbers(ROWS, 4), "b": numbers(ROWS, 5, seed=1)},),
        lambda: {"optimizer": adam()},
    )


@pattern
def clip() -> Training:
    def add(a, b):
        logits = ops.matmul(normalized(a), ops.transpose(normalized(b))) / 0.3
        own = ops.arange(ops.shape(logits)[0])
        cross = keras.losses.sparse_categorical_crossentropy
        back = cross(own, ops.transpose(logits), from_logits=True)
        return ops.mean(cross(own, logits, from_logits=True) + back) / 2

    return _two_towers(add)


@pattern
def in_batch_negatives() -> Training:
    def add(a, b):
        scores = ops.matmul(a, ops.transpose(b))
        labels = ops.eye(ops.shape(scores)[0])
        return ops.sum(keras.losses.categorical_crossentropy(labels, scores, from_logits=True))

    return _two_towers(add)


@pattern
def contrastive_pairs() -> Training:
    def add(a, b):
        d = ops.sqrt(ops.sum(ops.square(a - b), axis=-1) + 1e-6)
        near = ops.cast(ops.sum(a, axis=-1) > 0, "float32")
        return near * ops.square(d) + (1 - near) * ops.square(ops.relu(1 - d))

    return _two_towers(add)


@pattern
def maximum_mean_discrepancy() -> Training:
    def kernel(a, b):
        return ops.mean(ops.exp(-ops.sum(ops.square(a[:, None] - b[None]), axis=-1)))

    return _two_towers(lambda a, b: kernel(a, a) + kernel(b, b) - 2 * kernel(a, b))


@pattern
def coral() -> Training:
    def covariance(x):
        x = x - ops.mean(x, axis=0)
        return ops.matmul(ops.transpose(x), x) / ops.cast(ops.shape(x)[0] - 1, "float32")

    return _two_towers(lambda a, b: ops.sum(ops.square(covariance(a) - covariance(b))) / 36)


@pattern
def barlow_twins() -> Training:
    def add(a, b):
        a, b = [(v - ops.mean(v, axis=0)) / (ops.std(v, axis=0) + 1e-3) for v in (a, b)]
        c = ops.matmul(ops.transpose(a), b) / ops.cast(ops.shape(a)[0], "float32")
        return ops.sum(ops.square(c - ops.eye(3)) * (0.05 + 0.95 * ops.eye(3)))

    return _two_towers(add)


@pattern
def vicreg() -> Training:
    def spread(x):
        return ops.mean(ops.relu(1 - ops.sqrt(ops.var(x, axis=0) + 1e-4)))

    def covariance(x):
        x = x - ops.mean(x, axis=0)
        c = ops.matmul(ops.transpose(x), x) / ops.cast(ops.shape(x)[0] - 1, "float32")
        return ops.sum(ops.square(c * (1 - ops.eye(3)))) / 3

    def add(a, b):
        return (
            25 * ops.mean(ops.square(a - b))
            + 25 * (spread(a) + spread(b))
            + covariance(a)
            + covariance(b)
        )

    return _two_towers(add)


@pattern
def center_loss() -> Training:
    """The centers of the classes are state that moves toward the rows of a batch."""

    class Centers(layers.Layer):
        def build(self, shapes):
            self.centers = self.add_weight((3, 5), "zeros", trainable=False, name="centers")

        def call(self, hidden, labels, training=False):
            labels = ops.one_hot(labels, 3, dtype="float32")
            d = hidden - ops.matmul(labels, self.centers)
            self.add_loss(0.1 * ops.mean(ops.sum(ops.square(d), axis=-1)))
            if training:
                moved = ops.matmul(ops.transpose(labels), d)
                counts = ops.sum(labels, axis=0)[:, None]
                self.centers.assign_add(0.5 * moved / (1 + counts))
            return hidden

    def model() -> keras.Model:
        x = {"x": keras.Input((4,)), "labels": keras.Input((), dtype="int32")}
        hidden = layers.Dense(5, activation="tanh")(x["x"])
        return keras.Model(x, layers.Dense(3)(Centers()(hidden, x["labels"])))

    labels = integers(3, ROWS)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Training(
        model,
        lambda: ({"x": numbers(ROWS, 4), "labels": labels}, labels),
        lambda: {"optimizer": adam(), "loss": loss},
    )


# Models that compute their own steps.


class Stepping(keras.Model):
    """Applies the gradients of `losses_of(x, y)`, which returns the loss and logs."""

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss, logs = self.losses_of(x, y, training=True)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        # Under the name of a metric, "loss", Keras would return the metric's value instead.
        return {"total": loss, **logs}

    def call(self, x, training=False):
        return self.network(x, training=training)


def _network(outputs: int = 3, features: int = 4) -> keras.Sequential:
    hidden = layers.Dense(5, activation="tanh")
    return keras.Sequential([keras.Input((features,)), hidden, layers.Dense(outputs)])


@pattern
def simclr() -> Training:
    """Two views by noise, NT-Xent over all rows of both, and an accuracy of the batch."""

    class SimCLR(Stepping):
        def __init__(self):
            super().__init__()
            self.network = _network()
            self.noise = layers.GaussianNoise(0.2, seed=1)
            self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")

        def losses_of(self, x, y, training):
            views = [normalized(self(self.noise(x, training=True))) for _ in range(2)]
            z = ops.concatenate(views, axis=0)
            rows = ops.shape(x)[0]
            logits = ops.matmul(z, ops.transpose(z)) / 0.5 - 1e3 * ops.eye(2 * rows)
            labels = ops.concatenate([ops.arange(rows, 2 * rows), ops.arange(rows)], axis=0)
            self.accuracy.update_state(labels, logits)
            loss = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
            return ops.mean(loss), {"accuracy": self.accuracy.result()}

    return by_step(SimCLR, numbers(ROWS, 4))


@pattern
def momentum_encoder() -> Training:
    """A target network follows by moving averages: BYOL without views."""

    class Byol(Stepping):
        def __init__(self):
            super().__init__()
            self.network, self.target = _network(), _network()
            self.target.set_weights(self.network.get_weights())
            self.target.trainable = False
            self.predictor = layers.Dense(3)
            self.predictor.build((None, 3))

        def losses_of(self, x, y, training):
            online = normalized(self.predictor(self(x)))
            target = normalized(ops.stop_gradient(self.target(x[:, ::-1])))
            return ops.mean(2 - 2 * ops.sum(online * target, axis=-1)), {}

        def train_step(self, data):
            logs = super().train_step(data)
            for slow, fast in zip(self.target.weights, self.network.weights, strict=True):
                slow.assign(0.9 * slow + 0.1 * fast)
            return logs

    return by_step(Byol, numbers(ROWS, 4))


@pattern
def memory_queue() -> Training:
    """MoCo: the keys of earlier batches are state, with a fixed number of rows."""

    class Moco(Stepping):
        def __init__(self):
            super().__init__()
            self.network = _network()
            self.queue = self.add_weight((14, 3), "random_normal", trainable=False, name="queue")

        def losses_of(self, x, y, training):
            q = normalized(self(x))
            keys = ops.stop_gradient(normalized(self(x[:, ::-1])))
            own = ops.sum(q * keys, axis=1, keepdims=True)
            logits = ops.concatenate([own, ops.matmul(q, ops.transpose(self.queue))], axis=1)
            labels = ops.zeros((ops.shape(x)[0],), "int32")
            self.queue.assign(ops.concatenate([keys, self.queue], axis=0)[:14])
            loss = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
            return ops.mean(loss), {}

    return by_step(Moco, numbers(ROWS, 4))


class Gan(keras.Model):
    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = _network(4, 2), _network(1, 4)
        self.draws = keras.random.SeedGenerator(3)
        self.d_loss, self.g_loss = keras.metrics.Mean("d_loss"), keras.metrics.Mean("g_loss")

    def compile(self, **settings):
        super().compile()
        self.d_optimizer, self.g_optimizer = adam(), adam()

    @property
    def metrics(self):
        return [self.d_loss, self.g_loss]

    def _latent(self, rows):
        return keras.random.normal((rows, 2), seed=self.draws)


@pattern
def gan() -> Training:
    class Plain(Gan):
        def train_step(self, data):
            rows = ops.shape(data)[0]
            cross = keras.losses.BinaryCrossentropy(from_logits=True)
            everything = ops.concatenate([self.generator(self._latent(rows)), data], axis=0)
            labels = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))], axis=0)
            with tf.GradientTape() as tape:
                d_loss = cross(labels, self.discriminator(everything))
            weights = self.discriminator.trainable_weights
            self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)
            latent = self._latent(rows)
            with tf.GradientTape() as tape:
                scores = self.discriminator(self.generator(latent))
                g_loss = cross(ops.zeros((rows, 1)), scores)
            weights = self.generator.trainable_weights
            self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)
            self.d_loss.update_state(d_loss)
            self.g_loss.update_state(g_loss)
            return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}

    return by_step(Plain, numbers(ROWS, 4))


@pattern
def wgan_gp() -> Training:
    class Wasserstein(Gan):
        def _penalty(self, real, fake):
            share = keras.random.uniform((ops.shape(real)[0], 1), seed=self.draws)
            between = share * real + (1 - share) * fake
            with tf.GradientTape() as tape:
                tape.watch(between)
                scores = self.discriminator(between)
            norms = ops.sqrt(ops.sum(tape.gradient(scores, between) ** 2, axis=1) + 1e-6)
            return ops.mean((norms - 1) ** 2)

        def train_step(self, data):
            rows = ops.shape(data)[0]
            for _ in range(2):
                fake = self.generator(self._latent(rows))
                with tf.GradientTape() as tape:
                    scores = self.discriminator(fake), self.discriminator(data)
                    cost = ops.mean(scores[0]) - ops.mean(scores[1])
                    d_loss = cost + 10 * self._penalty(data, fake)
                weights = self.discriminator.trainable_weights
                self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)
            with tf.GradientTape() as tape:
                g_loss = -ops.mean(self.discriminator(self.generator(self._latent(rows))))
            weights = self.generator.trainable_weights
            self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)
            return {"critic": d_loss, "generator": g_loss}

    return by_step(Wasserstein, numbers(ROWS, 4))


@pattern
def distillation() -> Training:
    class Distiller(Stepping):
        def __init__(self):
            super().__init__()
            self.network, self.teacher = _network(), _network()
            self.teacher.trainable = False
            self.accuracy = keras.metrics.CategoricalAccuracy(name="accuracy")

        def losses_of(self, x, y, training):
            p, soft = self(x), ops.softmax(self.teacher(x) / 2)
            own = keras.losses.CategoricalCrossentropy(from_logits=True)(y, p)
            divergence = keras.losses.KLDivergence()(soft, ops.softmax(p / 2))
            self.accuracy.update_state(y, p)
            return 0.3 * own + 0.7 * 4 * divergence, {"accuracy": self.accuracy.result()}

    return by_step(Distiller, numbers(ROWS, 4), one_hot())


@pattern
def mixup() -> Training:
    """Each row is mixed with its counterpart in the reversed batch."""

    class Mixing(Stepping):
        def __init__(self):
            super().__init__()
            self.network = _network()
            self.draws = keras.random.SeedGenerator(3)

        def losses_of(self, x, y, training):
            share = keras.random.beta((ops.shape(x)[0], 1), 0.4, 0.4, seed=self.draws)
            x = share * x + (1 - share) * tf.reverse(x, [0])
            y = share * y + (1 - share) * tf.reverse(y, [0])
            return keras.losses.CategoricalCrossentropy(from_logits=True)(y, self(x)), {}

    return by_step(Mixing, numbers(ROWS, 4), one_hot())


@pattern
def shuffled_mixup() -> Training:
    """Each row is mixed with another one, by a random permutation from Keras."""

    class Mixing(Stepping):
        def __init__(self):
            super().__init__()
            self.network = _network()
            self.draws = keras.random.SeedGenerator(3)

        def losses_of(self, x, y, training):
            order = keras.random.shuffle(ops.arange(ops.shape(x)[0]), seed=self.draws)
            x = 0.7 * x + 0.3 * ops.take(x, order, axis=0)
            y = 0.7 * y + 0.3 * ops.take(y, order, axis=0)
            return keras.losses.CategoricalCrossentropy(from_logits=True)(y, self(x)), {}

    return by_step(Mixing, numbers(ROWS, 4), one_hot())


@pattern
def rolled_negatives() -> Training:
    """Negatives are the next rows of the batch."""

    class Rolling(Stepping):
        def __init__(self):
            super().__init__()
            self.network = _network()

        def losses_of(self, x, y, training):
            p = self(x)
            near = ops.sum(ops.square(p - y), axis=1)
            far = ops.sum(ops.square(p - ops.roll(y, 1, axis=0)), axis=1)
            return ops.mean(ops.relu(near - far + 1)), {}

    return by_step(Rolling, numbers(ROWS, 4), numbers(ROWS, 3, seed=3))


class Differentiated(Stepping):
    """A network with batch normalization, whose derivatives a step uses."""

    def __init__(self):
        super().__init__()
        self.network = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(5, activation="tanh"),
                layers.BatchNormalization(),
                layers.Dense(1),
            ]
        )


@pattern
def gradient_penalty_through_normalization() -> Training:
    class Penalized(Differentiated):
        def losses_of(self, x, y, training):
            with tf.GradientTape() as tape:
                tape.watch(x)
                p = self(x, training=training)
            slopes = ops.sqrt(ops.sum(tape.gradient(p, x) ** 2, axis=1) + 1e-3)
            return ops.mean((p - y) ** 2) + ops.mean((slopes - 1) ** 2), {}

    return by_scalar_step(Penalized)


@pattern
def penalty_of_gradients_of_weights() -> Training:
    class Penalized(Differentiated):
        def losses_of(self, x, y, training):
            with tf.GradientTape() as tape:
                loss = ops.mean((self(x, training=training) - y) ** 2)
            gradients = tape.gradient(loss, self.trainable_variables)
            return loss + sum(ops.sum(g**2) for g in gradients), {}

    return by_scalar_step(Penalized)


@pattern
def jacobian_through_normalization() -> Training:
    class Smooth(Differentiated):
        def losses_of(self, x, y, training):
            with tf.GradientTape() as tape:
                tape.watch(x)
                p = self(x, training=training)
            return ops.mean((p - y) ** 2) + ops.mean(tape.jacobian(p, x) ** 2), {}

    return by_scalar_step(Smooth)


@pattern
def vectorized_map_through_normalization() -> Training:
    """Applies a network to several scales of its input at once."""

    class Mapped(Differentiated):
        def losses_of(self, x, y, training):
            scales = tf.reshape(tf.range(1.0, 1.3, 0.1), (-1, 1, 1))
            p = tf.vectorized_map(lambda scale: self(x * scale, training=training), scales)
            return ops.mean((p - y) ** 2), {}

    return by_scalar_step(Mapped)


@pattern
def forward_derivative_through_normalization() -> Training:
    class Directed(Differentiated):
        def losses_of(self, x, y, training):
            with tf.autodiff.ForwardAccumulator(x, 0.3 * tf.ones_like(x)) as accumulator:
                p = self(x, training=training)
            return ops.mean((p - y) ** 2) + ops.mean(accumulator.jvp(p) ** 2), {}

    return by_scalar_step(Directed)


class WithHead(Stepping):
    """A network with a second head, which only the step uses."""

    def __init__(self):
        super().__init__()
        self.network = layers.Dense(1)
        self.head = layers.Dense(2)

    def losses_of(self, x, y, training):
        p = self(x, training=training)
        return ops.mean((p - y) ** 2) + ops.mean(self.head(x) ** 2), {}


@pattern
def layer_that_only_the_step_calls() -> Training:
    return by_scalar_step(WithHead)


@pattern
def variable_that_only_the_step_uses() -> Training:
    class Scaled(Stepping):
        def __init__(self):
            super().__init__()
            self.network = layers.Dense(1)
            self.scale = tf.Variable(0.3)

        def losses_of(self, x, y, training):
            p = self(x, training=training)
            return ops.mean((self.scale * p - y) ** 2), {}

    return by_scalar_step(Scaled)


@pattern
def clipping_by_hand() -> Training:
    class Clipping(Stepping):
        def __init__(self):
            super().__init__()
            self.network = _network()

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(y - self(x, training=True)))
            gradients = tape.gradient(loss, self.trainable_variables)
            gradients, norm = tf.clip_by_global_norm(gradients, 0.1)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss, "norm": norm}

    return by_step(Clipping, numbers(ROWS, 4), numbers(ROWS, 3, seed=3))


@pattern
def accumulation_by_hand() -> Training:
    """Gradients are kept in variables and applied in every second step."""

    class Accumulating(Stepping):
        def __init__(self):
            super().__init__()
            self.network = _network()
            self.step = self.add_weight((), "zeros", dtype="int32", trainable=False, name="step")
            self.kept = [
                self.add_weight(v.shape, "zeros", trainable=False, name=f"kept_{i}")
                for i, v in enumerate(self.network.trainable_variables)
            ]

        def train_step(self, data):
            x, y = data
            weights = self.network.trainable_variables
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(y - self(x, training=True)))
            for kept, gradient in zip(self.kept, tape.gradient(loss, weights), strict=True):
                kept.assign_add(gradient)
            self.step.assign_add(1)
            due = ops.cast(ops.equal(self.step % 2, 0), "float32")
            for kept, weight in zip(self.kept, weights, strict=True):
                weight.assign_sub(due * 0.05 * kept)
                kept.assign((1 - due) * kept)
            return {"loss": loss, "step": self.step}

    return by_step(Accumulating, numbers(ROWS, 4), numbers(ROWS, 3, seed=3))


@pattern
def sharpness_aware() -> Training:
    """SAM: gradients at weights that were moved along the gradients' direction."""

    class Sharpness(Stepping):
        def __init__(self):
            super().__init__()
            self.network = _network()

        def _gradients(self, x, y):
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(y - self(x, training=True)))
            return loss, tape.gradient(loss, self.trainable_variables)

        def train_step(self, data):
            x, y = data
            loss, first = self._gradients(x, y)
            norm = tf.linalg.global_norm(first)
            moves = [0.05 * g / (norm + 1e-6) for g in first]
            for weight, move in zip(self.trainable_variables, moves, strict=True):
                weight.assign_add(move)
            _, second = self._gradients(x, y)
            for weight, move in zip(self.trainable_variables, moves, strict=True):
                weight.assign_sub(move)
            self.optimizer.apply_gradients(zip(second, self.trainable_variables, strict=True))
            return {"loss": loss, "norm": norm}

    return by_step(Sharpness, numbers(ROWS, 4), numbers(ROWS, 3, seed=3))


@pattern
def adversarial_rows() -> Training:
    """Inputs are moved along the signs of their gradients."""

    class Adversarial(Stepping):
        def __init__(self):
            super().__init__()
            self.network = _network()

        def losses_of(self, x, y, training):
            with tf.GradientTape() as tape:
                tape.watch(x)
                plain = ops.mean(ops.square(y - self(x)))
            moved = x + 0.1 * ops.tanh(50 * tape.gradient(plain, x))
            return plain + ops.mean(ops.square(y - self(moved))), {"plain": plain}

    return by_step(Adversarial, numbers(ROWS, 4), numbers(ROWS, 3, seed=3))


class Perceptron(keras.Model):
    """A network with Keras's own step, which subclasses extend."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.outputs = layers.Dense(5, activation="tanh"), layers.Dense(3)

    def call(self, x):
        return self.outputs(self.hidden(x))


def _regression() -> tuple[Any, ...]:
    return numbers(ROWS, 4), numbers(ROWS, 3, seed=3)


def by_noisy_updates(cls: Callable[..., keras.Model], **settings: Any) -> Training:
    return Training(cls, _regression, lambda: {"optimizer": Noisy(0.1), "loss": "mse", **settings})


def by_telling_updates(cls: Callable[..., keras.Model]) -> Training:
    return Training(cls, _regression, lambda: {"optimizer": Telling(0.1), "loss": "mse"}, steps=())


@pattern
def rate_that_the_step_writes() -> Training:
    """A schedule reads a variable that `train_step` changes after the update."""

    class Scaled(keras.optimizers.schedules.LearningRateSchedule):
        def __init__(self, scale):
            super().__init__()
            self.scale = scale

        def __call__(self, step):
            return 0.1 * self.scale

    class Decaying(Perceptron):
        def __init__(self):
            super().__init__()
            self.scale = self.add_weight((), "ones", trainable=False, name="scale")
            self.compile(keras.optimizers.SGD(Scaled(self.scale)), "mse")

        def train_step(self, data):
            logs = super().train_step(data)
            self.scale.assign(0.5 * self.scale)
            return logs

    return Training(Decaying, _regression)


class Noisy(keras.optimizers.SGD):
    """Adds noise to gradients, and sums their squares in a variable that Keras does not track."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.squares = tf.Variable(0.0, trainable=False)

    def update_step(self, gradient, variable, learning_rate):
        self.squares.assign_add(tf.reduce_sum(gradient**2))
        gradient += 0.1 * keras.random.normal(variable.shape)
        super().update_step(gradient, variable, learning_rate)


@pattern
def noise_of_update_and_metric() -> Training:
    """The update and a metric draw from the global seed, the update first."""

    def noise(y, p):
        return ops.mean(keras.random.normal((2,))) + 0.0 * ops.mean(p, axis=-1)

    return by_noisy_updates(Perceptron, metrics=[noise])


@pattern
def log_of_what_the_update_counts() -> Training:
    class Logging(Perceptron):
        def train_step(self, data):
            return {**super().train_step(data), "squares": tf.identity(self.optimizer.squares)}

    return by_noisy_updates(Logging)


class Telling(keras.optimizers.SGD):
    """Stores the norm of the gradients that it applies in an attribute."""

    def apply(self, grads, trainable_variables=None):
        self.norm = ops.sqrt(sum(ops.sum(ops.square(g)) for g in grads))
        return super().apply(grads, trainable_variables)


@pattern
def norm_that_the_update_leaves() -> Training:
    class Logged(Perceptron):
        def train_step(self, data):
            return super().train_step(data) | {"norm": self.optimizer.norm}

    return by_telling_updates(Logged)


@pattern
def norm_that_the_update_may_leave() -> Training:
    class Logged(Perceptron):
        def train_step(self, data):
            return super().train_step(data) | {"norm": getattr(self.optimizer, "norm", -1.0)}

    return by_telling_updates(Logged)


@pattern
def weighted_step() -> Training:
    class Weighting(Stepping):
        def __init__(self):
            super().__init__()
            self.network = _network()

        def train_step(self, data):
            x, y, w = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                rows = ops.mean(ops.square(y - self(x, training=True)), axis=-1)
                loss = ops.sum(rows * w) / ops.sum(w)
            self.optimizer.apply(
                tape.gradient(loss, self.trainable_variables), self.trainable_variables
            )
            return {"total": loss, "plain": ops.mean(rows)}

    return by_step(Weighting, numbers(ROWS, 4), numbers(ROWS, 3, seed=3), row_weights())


@pattern
def logs_of_each_kind() -> Training:
    """Logs that are counts, booleans, and values of the batch or of its last row."""

    class Logging(Stepping):
        def __init__(self):
            super().__init__()
            self.network = _network()
            self.of_rows, self.of_batches = keras.metrics.Mean(), keras.metrics.Mean()

        def losses_of(self, x, y, training):
            rows = ops.mean(ops.square(y - self(x)), axis=-1)
            loss = ops.mean(rows)
            self.of_rows.update_state(rows)
            self.of_batches.update_state(ops.max(rows))
            return loss, {
                "rows": ops.shape(x)[0],
                "large": ops.sum(ops.cast(rows > 1, "int32")),
                "any": ops.any(rows > 1),
                "max": ops.max(rows),
                "last": rows[-1],
                "of_rows": self.of_rows.result(),
                "of_batches": self.of_batches.result(),
                "rate": self.optimizer.learning_rate,
                "iteration": self.optimizer.iterations,
            }

    return by_step(Logging, numbers(ROWS, 4), numbers(ROWS, 3, seed=3))


@pattern
def reduce_sum_by_the_global_batch() -> Training:
    class Dividing(Stepping):
        def __init__(self):
            super().__init__()
            self.network = _network()

        def losses_of(self, x, y, training):
            rows = tf.reduce_sum(tf.square(y - self(x)), axis=-1)
            total = tf.nn.compute_average_loss(rows, global_batch_size=BATCH)
            return tf.reduce_sum(rows) / BATCH, {"average": total}

    return by_step(Dividing, numbers(ROWS, 4), numbers(ROWS, 3, seed=3))


@pattern
def uncertainty_weights() -> Training:
    """Losses of several tasks, weighted by trained variances."""

    class Tasks(Stepping):
        def __init__(self):
            super().__init__()
            self.network = _network()
            self.logs = [self.add_weight((), "zeros", name=f"log_{i}") for i in range(2)]

        def losses_of(self, x, y, training):
            p = self(x)
            first = ops.sqrt(ops.mean(ops.square(y[:, :1] - p[:, :1])))
            second = ops.mean(ops.abs(y[:, 1:] - p[:, 1:]))
            tasks = zip((first, second), self.logs, strict=True)
            loss = sum(ops.exp(-log) * task + log for task, log in tasks)
            return loss, {"first": first, "second": second}

    return by_step(Tasks, numbers(ROWS, 4), numbers(ROWS, 3, seed=3))


@pattern
def vae_in_a_step() -> Training:
    class Vae(Stepping):
        def __init__(self):
            super().__init__()
            self.encoder, self.network = _network(4), _network(4, 2)
            self.draws = keras.random.SeedGenerator(3)
            self.trackers = [keras.metrics.Mean(n) for n in ("reconstruction", "kl")]

        @property
        def metrics(self):
            return self.trackers

        def losses_of(self, x, y, training):
            mean, log = ops.split(self.encoder(x), 2, axis=1)
            noise = keras.random.normal(ops.shape(mean), seed=self.draws)
            p = self(mean + ops.exp(0.5 * log) * noise)
            parts = (
                ops.mean(ops.sum(ops.square(x - p), axis=1)),
                ops.mean(-0.5 * ops.sum(1 + log - ops.square(mean) - ops.exp(log), axis=1)),
            )
            for tracker, part in zip(self.trackers, parts, strict=True):
                tracker.update_state(part)
            return sum(parts), {tracker.name: tracker.result() for tracker in self.trackers}

    return by_step(Vae, numbers(ROWS, 4))


@pattern
def policy_gradient() -> Training:
    """REINFORCE: returns are standardized over the batch, with an entropy bonus."""

    class Policy(Stepping):
        def __init__(self):
            super().__init__()
            self.network = _network()

        def losses_of(self, x, y, training):
            log = ops.log_softmax(self(x))
            returns = ops.sum(y, axis=1)
            advantages = (returns - ops.mean(returns)) / (ops.std(returns) + 1e-3)
            chosen = ops.take_along_axis(log, ops.argmax(y, axis=1)[:, None], axis=1)[:, 0]
            entropy = -ops.mean(ops.sum(ops.exp(log) * log, axis=1))
            return -ops.mean(chosen * advantages) - 0.01 * entropy, {"entropy": entropy}

    return by_step(Policy, numbers(ROWS, 4), numbers(ROWS, 3, seed=3))


# Layers with losses, state, or values of the whole batch.


def by_layer(
    layer: Callable[[], Callable[..., Any]],
    x: Callable[[], Any] = lambda: numbers(ROWS, 4),
    dtype: str = "float32",
) -> Training:
    """A layer between two dense ones, or on tokens, trained on squared errors."""

    def model() -> keras.Model:
        inputs = keras.Input(x().shape[1:], dtype=dtype)
        front = inputs if dtype == "int32" else layers.Dense(4)(inputs)
        hidden = layer()(front)
        hidden = layers.Flatten()(hidden) if len(hidden.shape) > 2 else hidden
        return keras.Model(inputs, layers.Dense(3)(hidden))

    return Training(
        model,
        lambda: (x(), numbers(ROWS, 3, seed=3)),
        lambda: {"optimizer": adam(), "loss": "mse"},
    )


@pattern
def minibatch_deviation() -> Training:
    """As in StyleGAN: the deviation over the batch is another feature."""

    class Deviation(layers.Layer):
        def call(self, x):
            deviation = ops.mean(ops.sqrt(ops.var(x, axis=0) + 1e-6))
            return ops.concatenate([x, ops.full((ops.shape(x)[0], 1), 1.0) * deviation], axis=1)

    return by_layer(Deviation)


@pattern
def batch_attention() -> Training:
    """Rows attend to all rows of the batch."""

    class Rows(layers.Layer):
        def call(self, x):
            scores = ops.softmax(ops.matmul(x, ops.transpose(x)) / 2.0)
            return ops.matmul(scores, x)

    return by_layer(Rows)


@pattern
def mixture_of_experts() -> Training:
    class Experts(layers.Layer):
        def __init__(self):
            super().__init__()
            self.gate = layers.Dense(3)
            self.experts = [layers.Dense(4, activation="tanh") for _ in range(3)]

        def build(self, shape):
            for layer in (self.gate, *self.experts):
                layer.build(shape)

        def call(self, x):
            gates = ops.softmax(self.gate(x))
            best = ops.one_hot(ops.argmax(gates, axis=-1), 3, dtype="float32")
            balance = ops.mean(best, axis=0) * ops.mean(gates, axis=0)
            self.add_loss(0.1 * 3 * ops.sum(balance))
            values = ops.stack([expert(x) for expert in self.experts], axis=1)
            return ops.sum(values * (gates * best)[:, :, None], axis=1)

    return by_layer(Experts)


@pattern
def experts_with_a_capacity() -> Training:
    """Rows beyond an expert's capacity are dropped, in the order of the batch."""

    class Capacity(layers.Layer):
        def build(self, shape):
            self.gate = self.add_weight((shape[-1], 2), name="gate")
            self.kernels = self.add_weight((2, shape[-1], shape[-1]), name="kernels")

        def call(self, x):
            gates = ops.softmax(ops.matmul(x, self.gate))
            best = ops.one_hot(ops.argmax(gates, axis=-1), 2, dtype="float32")
            position = ops.cumsum(best, axis=0) * best
            kept = best * ops.cast(position <= 4, "float32")
            values = ops.einsum("bi,eio->beo", x, self.kernels)
            return x + ops.sum(values * (gates * kept)[:, :, None], axis=1)

    return by_layer(Capacity)


@pattern
def vector_quantizer() -> Training:
    """VQ-VAE: the codebook is state, a moving average of the rows that chose its entries."""

    class Quantizer(layers.Layer):
        def build(self, shape):
            kept = {"trainable": False}
            self.table = self.add_weight((6, shape[-1]), "random_normal", name="table", **kept)
            self.counts = self.add_weight((6,), "ones", name="counts", **kept)
            self.sums = self.add_weight((6, shape[-1]), "zeros", name="sums", **kept)

        def call(self, x, training=False):
            squares = ops.sum(self.table**2, axis=1)
            d = squares[None] - 2 * ops.matmul(x, ops.transpose(self.table))
            chosen = ops.one_hot(ops.argmin(d, axis=1), 6, dtype="float32")
            quantized = ops.matmul(chosen, self.table)
            self.add_loss(0.25 * ops.mean(ops.square(ops.stop_gradient(quantized) - x)))
            if training:
                self.counts.assign(0.9 * self.counts + 0.1 * ops.sum(chosen, axis=0))
                rows = ops.stop_gradient(ops.matmul(ops.transpose(chosen), x))
                self.sums.assign(0.9 * self.sums + 0.1 * rows)
                self.table.assign(self.sums / (self.counts[:, None] + 1e-3))
            return x + ops.stop_gradient(quantized - x)

    return by_layer(Quantizer)


@pattern
def vae_by_add_loss() -> Training:
    return by_layer(lambda: Sampling(per_row=False))


@pattern
def vae_by_add_loss_of_rows() -> Training:
    return by_layer(lambda: Sampling(per_row=True))


class Sampling(layers.Layer):
    """Samples with a divergence as a loss: one for the batch, or one for each row."""

    def __init__(self, per_row):
        super().__init__()
        self.per_row = per_row
        self.draws = keras.random.SeedGenerator(3)

    def call(self, x):
        mean, log = ops.split(x, 2, axis=-1)
        kl = -0.5 * ops.sum(1 + log - ops.square(mean) - ops.exp(log), axis=-1)
        self.add_loss(kl if self.per_row else ops.mean(kl))
        noise = keras.random.normal(ops.shape(mean), seed=self.draws)
        return mean + ops.exp(0.5 * log) * noise


@pattern
def sparse_autoencoder() -> Training:
    """The mean activity over the batch is pulled toward a constant."""

    class Sparse(layers.Layer):
        def call(self, x):
            share = ops.clip(ops.mean(ops.sigmoid(x), axis=0), 1e-3, 1 - 1e-3)
            kl = 0.1 * ops.log(0.1 / share) + 0.9 * ops.log(0.9 / (1 - share))
            self.add_loss(0.2 * ops.sum(kl))
            return ops.sigmoid(x)

    return by_layer(Sparse)


@pattern
def batch_normalization() -> Training:
    return by_layer(layers.BatchNormalization)


@pattern
def batch_renormalization() -> Training:
    """Batch normalization by hand, with corrections toward the moving moments."""

    class Renormalization(layers.Layer):
        def build(self, shape):
            kept = {"trainable": False}
            self.mean = self.add_weight(shape[-1:], "zeros", name="mean", **kept)
            self.deviation = self.add_weight(shape[-1:], "ones", name="deviation", **kept)

        def call(self, x, training=False):
            if not training:
                return (x - self.mean) / self.deviation
            mean, deviation = ops.mean(x, axis=0), ops.sqrt(ops.var(x, axis=0) + 1e-3)
            r = ops.stop_gradient(ops.clip(deviation / self.deviation, 0.5, 2))
            d = ops.stop_gradient(ops.clip((mean - self.mean) / self.deviation, -1, 1))
            self.mean.assign(0.9 * self.mean + 0.1 * mean)
            self.deviation.assign(0.9 * self.deviation + 0.1 * deviation)
            return (x - mean) / deviation * r + d

    return by_layer(Renormalization)


@pattern
def group_normalization() -> Training:
    return by_layer(lambda: layers.GroupNormalization(2), lambda: numbers(ROWS, 3, 4))


@pattern
def spectral_normalization() -> Training:
    return by_layer(lambda: layers.SpectralNormalization(layers.Dense(4)))


@pattern
def weight_standardization() -> Training:
    class Standardized(layers.Dense):
        def call(self, x):
            kernel = self.kernel - ops.mean(self.kernel, axis=0)
            kernel = kernel / (ops.std(kernel, axis=0) + 1e-3)
            return ops.matmul(x, kernel) + self.bias

    return by_layer(lambda: Standardized(4))


@pattern
def whitened_rows() -> Training:
    """Decorrelates features by the covariance of the batch."""

    class Whitening(layers.Layer):
        def call(self, x):
            x = x - ops.mean(x, axis=0)
            rows = ops.cast(ops.shape(x)[0], "float32")
            covariance = ops.matmul(ops.transpose(x), x) / rows + 0.5 * ops.eye(4)
            return ops.matmul(x, ops.inv(covariance))

    return by_layer(Whitening)


@pattern
def running_moments_of_rewards() -> Training:
    """Welford's moments of all previous rows are state."""

    class Running(layers.Layer):
        def build(self, shape):
            kept = {"trainable": False}
            self.count = self.add_weight((), "ones", name="count", **kept)
            self.mean = self.add_weight(shape[-1:], "zeros", name="mean", **kept)
            self.squares = self.add_weight(shape[-1:], "ones", name="squares", **kept)

        def call(self, x, training=False):
            if training:
                rows = ops.cast(ops.shape(x)[0], "float32")
                total = self.count + rows
                delta = ops.mean(x, axis=0) - self.mean
                spread = ops.sum(ops.square(x - ops.mean(x, axis=0)), axis=0)
                self.squares.assign_add(spread + delta**2 * self.count * rows / total)
                self.mean.assign_add(delta * rows / total)
                self.count.assign(total)
            return (x - self.mean) / ops.sqrt(self.squares / self.count + 1e-3)

    return by_layer(Running)


# Language models.


class Block(layers.Layer):
    """A block of a GPT with learned positions."""

    def __init__(self, words=7, length=4, width=4):
        super().__init__()
        self.tokens, self.positions = (
            layers.Embedding(words, width),
            layers.Embedding(length, width),
        )
        self.attention = layers.MultiHeadAttention(2, width // 2, dropout=0.1, seed=1)
        self.norms = [layers.LayerNormalization(epsilon=1e-3) for _ in range(2)]
        self.dense = layers.Dense(width, activation="gelu")

    def call(self, x, training=False):
        x = self.tokens(x) + self.positions(ops.arange(ops.shape(x)[1]))
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed, use_causal_mask=True, training=training)
        return x + self.dense(self.norms[1](x))


def _language(loss: Any, head: Callable[[], Any] = lambda: layers.Dense(7), **settings: Any):
    def model() -> keras.Model:
        tokens = keras.Input((4,), dtype="int32")
        return keras.Model(tokens, head()(Block()(tokens)))

    return Training(
        model,
        lambda: (integers(7, ROWS, 4), integers(7, ROWS, 4, seed=1)),
        lambda: {"optimizer": adam(), "loss": loss, **settings},
    )


@pattern
def gpt_block() -> Training:
    return _language(keras.losses.SparseCategoricalCrossentropy(from_logits=True))


@pattern
def gpt_block_with_padding() -> Training:
    """Token 0 does not count: the sum is divided by the number of other tokens."""

    def loss(y, p):
        mask = ops.cast(ops.not_equal(y, 0), "float32")
        values = keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True)
        return ops.sum(values * mask) / ops.sum(mask)

    def accuracy(y, p):
        mask = ops.cast(ops.not_equal(y, 0), "float32")
        right = ops.cast(ops.equal(ops.cast(y, "int32"), ops.argmax(p, axis=-1)), "float32")
        return ops.sum(right * mask) / ops.sum(mask)

    return _language(loss, metrics=[accuracy])


@pattern
def masked_language_model() -> Training:
    """The step masks random tokens, and weights make only these count."""

    class Masked(Stepping):
        def __init__(self):
            super().__init__()
            self.network = keras.Sequential(
                [keras.Input((4,), dtype="int32"), Block(words=8), layers.Dense(7)]
            )
            self.draws = keras.random.SeedGenerator(3)
            self.tracker = keras.metrics.Mean(name="loss")

        def losses_of(self, x, y, training):
            chosen = keras.random.uniform(ops.shape(x), seed=self.draws) < 0.4
            p = self(ops.where(chosen, 7, x), training=training)
            values = keras.losses.sparse_categorical_crossentropy(x, p, from_logits=True)
            mask = ops.cast(chosen, "float32")
            self.tracker.update_state(values, sample_weight=mask)
            loss = ops.sum(values * mask) / ops.maximum(1.0, ops.sum(mask))
            return loss, {"mean": self.tracker.result()}

    return by_step(Masked, integers(7, ROWS, 4))


@pattern
def relative_positions() -> Training:
    """A table of biases that is looked up by constant distances, as in Swin and T5."""
    index = np.arange(4)[:, None] - np.arange(4)[None] + 3

    class Relative(layers.Layer):
        def build(self, shape):
            self.table = self.add_weight((7,), "random_normal", name="table")

        def call(self, x):
            bias = ops.reshape(ops.take(self.table, index.reshape(-1), axis=0), (4, 4))
            scores = ops.matmul(x, ops.transpose(x, (0, 2, 1))) + bias
            return ops.matmul(ops.softmax(scores), x)

    return by_layer(Relative, lambda: numbers(ROWS, 4, 4))


@pattern
def tied_embeddings() -> Training:
    class Tied(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = layers.Embedding(7, 4)
            self.dense = layers.Dense(4, activation="tanh")

        def call(self, x):
            hidden = self.dense(self.table(x) + self.table(ops.arange(4)))
            return ops.matmul(hidden, ops.transpose(self.table.embeddings))

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Training(
        Tied,
        lambda: (integers(7, ROWS, 4), integers(7, ROWS, 4, seed=1)),
        lambda: {"optimizer": adam(), "loss": loss},
    )


@pattern
def class_token() -> Training:
    """A trained token in front of each row, and learned positions added to patches: ViT."""

    class Patches(layers.Layer):
        def build(self, shape):
            self.token = self.add_weight((1, 1, shape[-1]), "random_normal", name="token")
            self.positions = layers.Embedding(shape[1] + 1, shape[-1])
            self.positions.build((None,))
            self.attention = layers.MultiHeadAttention(2, 2)
            self.attention.build((None, shape[1] + 1, shape[2]), (None, shape[1] + 1, shape[2]))

        def call(self, x):
            token = ops.repeat(self.token, ops.shape(x)[0], axis=0)
            x = ops.concatenate([token, x], axis=1) + self.positions(ops.arange(4))
            return self.attention(x, x)[:, 0]

        def compute_output_shape(self, shape):
            return (shape[0], shape[2])

    return by_layer(Patches, lambda: numbers(ROWS, 3, 4))


@pattern
def scanned_state() -> Training:
    """A recurrence by `tf.while_loop` over time."""

    class Scanned(layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight((shape[-1], shape[-1]), name="kernel")

        def call(self, x):
            def body(i, state):
                return i + 1, ops.tanh(ops.matmul(state, self.kernel) + x[:, i])

            return tf.while_loop(lambda i, _: i < 3, body, (0, ops.zeros_like(x[:, 0])))[1]

        def compute_output_shape(self, shape):
            return (shape[0], shape[2])

    return by_layer(Scanned, lambda: numbers(ROWS, 3, 4))


@pattern
def diagonal_of_a_known_batch() -> Training:
    """The similarity of each row to itself, with a known number of rows."""

    def loss(y, p):
        return tf.reduce_mean((tf.linalg.diag_part(ops.matmul(p, ops.transpose(p))) - y) ** 2)

    return dataclasses.replace(
        by_loss(loss, lambda: numbers(ROWS, seed=3)), fit={"batch_size": ROWS // 2}, steps=()
    )


@pattern
def loop_over_the_batch() -> Training:
    """A loop whose iterations reduce over the rows, as in Sinkhorn and routing by agreement."""

    class Routed(layers.Layer):
        def call(self, x):
            def body(i, state):
                return i + 1, ops.tanh(state + ops.mean(x * state, axis=0))

            return x + tf.while_loop(lambda i, _: i < 3, body, (0, tf.ones([4])))[1]

    return by_layer(Routed, lambda: numbers(ROWS, 4))


DEFAULT: list[str] = []
