"""Losses of every origin and reduction."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.strategy.behaviours.common import cross_entropy, fit, mlp, outcome, rows, scope


def mean_with_sample_weight(strategy):
    x, y = rows(30)
    weights = np.random.default_rng(3).random(30).astype("float32")
    with scope(strategy):
        model = mlp()
        loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        )
        model.compile("sgd", loss)
    return outcome(model, fit(model, x, y, sample_weight=weights, batch_size=11))


def regularizers_and_added_losses(strategy):
    class AddsLoss(keras.layers.Layer):
        def call(self, x):
            self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
            return x

    x, y = rows(44)
    with scope(strategy):
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(8, kernel_regularizer="l2", bias_regularizer="l1"),
                AddsLoss(),
                keras.layers.Dense(3),
            ]
        )
        model.compile("sgd", cross_entropy())
    return outcome(model, fit(model, x, y, batch_size=15))


def losses_of_all_reductions(strategy):
    x, y = rows(20, classes=2)
    target = y[:, None].astype("float32")
    results = {}
    for reduction in ("sum", "none", None, "mean", "sum_over_batch_size"):
        with scope(strategy):
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
            model.compile("sgd", keras.losses.MeanSquaredError(reduction=reduction))
        results[str(reduction)] = [fit(model, x, target, batch_size=10), model.get_weights()]
    return results


def loss_as_a_function(strategy):
    def mean_square(y_true, y_pred):
        return tf.reduce_mean(tf.square(tf.cast(y_true, y_pred.dtype) - y_pred))

    x, y = rows(45)
    with scope(strategy):
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("sgd", mean_square)
    return outcome(model, fit(model, x, y, batch_size=20))


def loss_computed_by_the_model(strategy):
    class Net(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return keras.ops.mean(keras.ops.square(keras.ops.cast(y, "float32") - y_pred[:, 0]))

    x, y = rows(45)
    with scope(strategy):
        inputs = keras.Input((8,))
        model = Net(inputs, keras.layers.Dense(2)(inputs))
        model.compile("sgd")
    return outcome(model, fit(model, x, y, batch_size=20))


def adversaries_without_a_call(strategy):
    """Two networks, two optimizers and no `call`: Keras's way of writing a GAN."""

    class Adversaries(keras.Model):
        def __init__(self, critic, maker):
            super().__init__()
            self.critic, self.maker = critic, maker
            self.tracker = keras.metrics.Mean(name="critic_loss")

        def compile(self, critic_optimizer, maker_optimizer):
            super().compile()
            self.critic_optimizer, self.maker_optimizer = critic_optimizer, maker_optimizer

        @property
        def metrics(self):
            return [self.tracker]

        def train_step(self, real):
            noise = real[:, ::-1]
            with tf.GradientTape() as tape:
                verdict = self.critic(self.maker(noise)) - self.critic(real)
                loss = keras.ops.mean(verdict)
            gradients = tape.gradient(loss, self.critic.trainable_weights)
            self.critic_optimizer.apply(gradients, self.critic.trainable_weights)
            with tf.GradientTape() as tape:
                fooled = -keras.ops.mean(self.critic(self.maker(noise)))
            gradients = tape.gradient(fooled, self.maker.trainable_weights)
            self.maker_optimizer.apply(gradients, self.maker.trainable_weights)
            self.tracker.update_state(loss)
            return {"critic_loss": self.tracker.result()}

    x, _ = rows(48)
    with scope(strategy):
        critic = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        maker = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
        model = Adversaries(critic, maker)
        model.compile(keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.01))
    history = fit(model, x, batch_size=12)
    return {"weights": critic.get_weights() + maker.get_weights(), "history": history}


def outputs_with_their_own_losses(strategy):
    x, y = rows(45)
    with scope(strategy):
        inputs = keras.Input((8,))
        outputs = [keras.layers.Dense(3, name="a")(inputs), keras.layers.Dense(1, name="b")(inputs)]
        model = keras.Model(inputs, outputs)
        model.compile("sgd", [cross_entropy(), "mse"])
    return outcome(model, fit(model, x, [y, x[:, :1]], batch_size=20))
