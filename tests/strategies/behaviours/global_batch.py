"""Losses and training steps of one's own that take values of the whole batch."""

from __future__ import annotations

import keras
import tensorflow as tf

import tfdist
from tests.strategies.behaviours.common import fit, mlp, outcome, rows, scope


def contrastive_loss(strategy):
    """Each row is compared with all others, and the hardest ones count."""

    def loss(labels, embeddings):
        labels, embeddings = tfdist.global_batch.rows((labels, embeddings))
        labels = keras.ops.reshape(labels, (-1,))
        distances = keras.ops.sum((embeddings[:, None] - embeddings[None]) ** 2, axis=-1)
        same = keras.ops.cast(labels[:, None] == labels[None], "float32")
        furthest = keras.ops.max(distances * same, axis=1)
        nearest = keras.ops.min(distances + 1e3 * same, axis=1)
        return keras.ops.mean(keras.ops.softplus(furthest - nearest))

    return _trained(strategy, loss)


def ratio_of_sums(strategy):
    def loss(labels, logits):
        labels = keras.ops.one_hot(keras.ops.reshape(labels, (-1,)), 3)
        found = keras.ops.sigmoid(logits)
        both = keras.ops.sum(labels * found)
        both, all_ = tfdist.global_batch.total((both, keras.ops.sum(labels + found)))
        return 1 - 2 * both / all_

    return _trained(strategy, loss)


def _trained(strategy, loss):
    x, y = rows(11)
    with scope(strategy):
        model = mlp()
        model.compile(keras.optimizers.SGD(0.1), loss)
    history = fit(model, x, y, batch_size=7, shuffle=False)
    return outcome(model, history, evaluated=model.evaluate(x, y, batch_size=7, verbose=0))


def clipped_in_the_train_step(strategy):
    class Net(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            gradients = tfdist.global_batch.mean(gradients)
            gradients = [tf.clip_by_norm(gradient, 0.1) for gradient in gradients]
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    x, y = rows(11)
    with scope(strategy):
        inputs = keras.Input((8,))
        model = Net(inputs, keras.layers.Dense(3)(inputs))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    return outcome(model, fit(model, x, y, batch_size=7, shuffle=False))


def in_a_loop_by_hand(strategy):
    """What is said in a `strategy.run`; outside of it values stay as they are."""
    ones = tf.ones([2])
    functions = (tfdist.global_batch.total, tfdist.global_batch.rows)
    kept = [function(ones).numpy().tolist() for function in functions]
    try:
        strategy.run(lambda: tfdist.global_batch.total(ones))
    except tfdist.errors.UnsupportedError as error:
        return [kept, str(error)]
    return [kept, "no error"]
