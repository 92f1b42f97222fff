"""Kinds of models."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.strategy.behaviours.common import (
    compile_mlp,
    cross_entropy,
    fit,
    mlp,
    outcome,
    rows,
    scope,
)


def sequential(strategy):
    x, y = rows(64)
    model = compile_mlp(strategy)
    history = fit(model, x, y, batch_size=16)
    return outcome(model, history, predictions=model.predict(x, verbose=0))


def functional_with_two_inputs_and_outputs(strategy):
    a, y = rows(48, features=6)
    b, _ = rows(48, features=4, seed=1)
    with scope(strategy):
        left, right = keras.Input((6,), name="left"), keras.Input((4,), name="right")
        joined = keras.layers.Concatenate()(
            [keras.layers.Dense(8)(left), keras.layers.Dense(8)(right)]
        )
        first = keras.layers.Dense(3, name="first")(joined)
        second = keras.layers.Dense(1, name="second")(joined)
        model = keras.Model([left, right], {"first": first, "second": second})
        model.compile(
            "sgd",
            {"first": cross_entropy(), "second": "mse"},
            metrics={"first": ["accuracy"], "second": ["mae"]},
            loss_weights={"first": 1.0, "second": 0.3},
        )
    targets = {"first": y, "second": a[:, :1]}
    return outcome(model, fit(model, {"left": a, "right": b}, targets, batch_size=16))


def subclassed_built_by_fit(strategy):
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden = keras.layers.Dense(8, activation="relu")
            self.out = keras.layers.Dense(3)

        def call(self, x):
            return self.out(self.hidden(x))

    x, y = rows(40)
    with scope(strategy):
        model = Net()
        model.compile("adam", cross_entropy(), metrics=["accuracy"])
    return outcome(model, fit(model, x, y, batch_size=20))


def custom_train_step(strategy):
    class Net(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(y, self(x, training=False))
            return {metric.name: metric.result() for metric in self.metrics}

    x, y = rows(64)
    with scope(strategy):
        inputs = keras.Input((8,))
        model = Net(inputs, keras.layers.Dense(3)(inputs))
        model.compile("sgd", cross_entropy(), metrics=["accuracy"])
    return outcome(model, fit(model, x, y, batch_size=16))


def custom_train_step_with_other_logs(strategy):
    class Net(keras.Model):
        def train_step(self, data):
            logs = super().train_step(data)
            return {**logs, "largest": tf.reduce_mean(data[0])}

    x, y = rows(45)
    with scope(strategy):
        inputs = keras.Input((8,))
        model = Net(inputs, keras.layers.Dense(3)(inputs))
        model.compile("sgd", cross_entropy(), metrics=["accuracy"])
    return outcome(model, fit(model, x, y, batch_size=15))


def lstm_with_masking(strategy):
    generator = np.random.default_rng(0)
    tokens = generator.integers(1, 20, (36, 7))
    tokens[np.arange(7)[None, :] >= generator.integers(1, 7, 36)[:, None]] = 0
    y = generator.integers(0, 3, 36)
    with scope(strategy):
        model = keras.Sequential(
            [
                keras.Input((7,), dtype="int32"),
                keras.layers.Embedding(20, 8, mask_zero=True),
                keras.layers.LSTM(8),
                keras.layers.Dense(3),
            ]
        )
        model.compile("adam", cross_entropy(), metrics=["accuracy"])
    return outcome(model, fit(model, tokens, y, batch_size=10))


def stateful_lstm(strategy):
    """A layer that keeps a state for each row of a batch, also from training to prediction."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(12, 5, 3)).astype("float32")
    with scope(strategy):
        layers = [keras.Input(batch_shape=(4, 5, 3)), keras.layers.LSTM(3, stateful=True)]
        model = keras.Sequential([*layers, keras.layers.Dense(2)])
        model.compile("adam", "mse")
    history = fit(model, x, x[:, 0, :2], batch_size=4, shuffle=False)
    return outcome(model, history, predictions=model.predict(x, batch_size=4, verbose=0))


def masked_loss_over_time(strategy):
    generator = np.random.default_rng(0)
    tokens = generator.integers(1, 9, (21, 5))
    tokens[np.arange(5)[None, :] >= generator.integers(1, 5, 21)[:, None]] = 0
    with scope(strategy):
        model = keras.Sequential(
            [
                keras.Input((5,), dtype="int32"),
                keras.layers.Embedding(9, 6, mask_zero=True),
                keras.layers.GRU(6, return_sequences=True),
                keras.layers.Dense(9),
            ]
        )
        model.compile("sgd", cross_entropy(), weighted_metrics=["accuracy"])
    weights = generator.random((21, 5)).astype("float32")
    return outcome(model, fit(model, tokens, tokens, sample_weight=weights, batch_size=8))


def convolution(strategy):
    generator = np.random.default_rng(0)
    x, y = generator.random((32, 8, 8, 3), "float32"), generator.integers(0, 3, 32)
    with scope(strategy):
        model = keras.Sequential(
            [
                keras.Input((8, 8, 3)),
                keras.layers.Conv2D(4, 3, activation="relu"),
                keras.layers.MaxPooling2D(),
                keras.layers.Flatten(),
                keras.layers.Dense(3),
            ]
        )
        model.compile("sgd", cross_entropy(), metrics=["accuracy"])
    return outcome(model, fit(model, x, y, batch_size=14))


def embedding_with_sparse_gradients(strategy):
    generator = np.random.default_rng(0)
    x, y = generator.integers(0, 30, (40, 4)), generator.integers(0, 3, 40)
    with scope(strategy):
        model = keras.Sequential(
            [
                keras.Input((4,), dtype="int32"),
                keras.layers.Embedding(30, 5),
                keras.layers.Flatten(),
                keras.layers.Dense(3),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01), cross_entropy(), metrics=["accuracy"])
    return outcome(model, fit(model, x, y, batch_size=10))


def synchronized_batch_normalization(strategy):
    x, y = rows(50)
    with scope(strategy):
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(8),
                keras.layers.BatchNormalization(synchronized=strategy is not None),
                keras.layers.Dense(3),
            ]
        )
        model.compile("sgd", cross_entropy(), metrics=["accuracy"])
    history = fit(model, x, y, batch_size=16, validation_data=(x, y))
    return outcome(model, history)


def metrics_of_all_kinds(strategy):
    x, y = rows(45, classes=2)
    with scope(strategy):
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, activation="sigmoid")])
        metrics = [
            "accuracy",
            keras.metrics.AUC(name="auc"),
            keras.metrics.Precision(name="precision"),
            keras.metrics.F1Score(name="f1", threshold=0.5),
        ]
        model.compile("sgd", "binary_crossentropy", metrics=metrics)
    targets = y[:, None].astype("float32")
    return outcome(model, fit(model, x, targets, batch_size=14))


def dropout_and_noise(strategy):
    x, y = rows(45)
    with scope(strategy):
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.GaussianNoise(0.3),
                keras.layers.Dense(7, activation="relu"),
                keras.layers.Dropout(0.4),
                keras.layers.Reshape((7, 1)),
                keras.layers.Dense(5),
                keras.layers.SpatialDropout1D(0.3),
                keras.layers.GaussianDropout(0.2),
                keras.layers.Flatten(),
                keras.layers.Dense(3),
            ]
        )
        model.compile("sgd", cross_entropy(), metrics=["accuracy"])
    return outcome(model, fit(model, x, y, batch_size=20, epochs=3))


def transformer_with_dropout(strategy):
    tokens = np.random.default_rng(0).integers(1, 12, (22, 6))
    with scope(strategy):
        inputs = keras.Input((6,), dtype="int32")
        x = keras.layers.Embedding(12, 8, mask_zero=True)(inputs)
        attended = keras.layers.MultiHeadAttention(2, 4, dropout=0.2)(x, x, use_causal_mask=True)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dropout(0.1)(attended))
        model = keras.Model(inputs, keras.layers.Dense(12)(x))
        model.compile(keras.optimizers.Adam(0.01), cross_entropy())
    return outcome(model, fit(model, tokens, np.roll(tokens, -1, 1), batch_size=8, epochs=2))


def metrics_with_dicts_and_initial_values(strategy):
    class Two(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="two")
            self.rows = self.add_weight(shape=(), initializer="ones", name="rows")
            self.batches = self.add_variable((), "ones", dtype="int32", name="batches")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.rows.assign_add(keras.ops.cast(keras.ops.shape(y_pred)[0], "float32"))

        def result(self):
            return {"rows": self.rows, "one": self.batches + 1}

        def reset_state(self):
            self.rows.assign(1.0)
            self.batches.assign(1)

    x, y = rows(45)
    with scope(strategy):
        model = mlp()
        model.compile("sgd", cross_entropy(), metrics=[Two()])
    return outcome(model, fit(model, x, y, batch_size=20))


def counters_agree(strategy):
    """State that counts is the same on all workers, if not what one process counts."""

    class Counts(keras.layers.Layer):
        def build(self, shape):
            self.steps = self.add_weight(
                shape=(), initializer="zeros", dtype="int32", trainable=False
            )

        def call(self, x):
            self.steps.assign_add(1)
            return x

    x, y = rows(40)
    with scope(strategy):
        model = keras.Sequential([keras.Input((8,)), Counts(), keras.layers.Dense(3)])
        model.compile("sgd", cross_entropy())
    return outcome(model, fit(model, x, y, batch_size=10))


def random_integers(strategy):
    class Rolls(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.seed = keras.random.SeedGenerator(5)

        def call(self, x):
            dice = keras.random.randint(keras.ops.shape(x), 0, 6, seed=self.seed)
            weight = keras.random.uniform((8, 8), seed=self.seed)
            return x + keras.ops.cast(dice, x.dtype) + keras.ops.matmul(x, weight)

    x, y = rows(45)
    with scope(strategy):
        model = keras.Sequential([keras.Input((8,)), Rolls(), keras.layers.Dense(3)])
        model.compile("sgd", cross_entropy())
    return outcome(model, fit(model, 0.1 * x, y, batch_size=16))


def variables_assigned_in_call(strategy):
    class Averages(keras.layers.Layer):
        def build(self, shape):
            self.mean = tf.Variable(tf.zeros(shape[-1:]), trainable=False)

        def call(self, x):
            self.mean.assign(0.5 * self.mean + 0.5 * tf.reduce_mean(x, axis=0))
            return x - tf.stop_gradient(self.mean)

    x, y = rows(45)
    with scope(strategy):
        averages = Averages()
        model = keras.Sequential([keras.Input((8,)), averages, keras.layers.Dense(3)])
        model.compile("sgd", cross_entropy())
    model.fit(x, y, batch_size=45, epochs=1, verbose=0)
    return {"mean": averages.mean.numpy()}
