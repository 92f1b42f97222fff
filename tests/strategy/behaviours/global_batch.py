"""Losses and training steps of one's own that take values of the whole batch."""

from __future__ import annotations

import keras
import tensorflow as tf

import tfdist
from tests.strategy.behaviours.common import fit, mlp, outcome, rows, scope


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
    """Own rows are compared with those of all replicas, and with a total; losses are summed."""
    x, _ = rows(21)
    with scope(strategy):
        model, other = mlp(), mlp()
        optimizer = keras.optimizers.SGD(0.1)
    variables = [*model.trainable_variables, *other.trainable_variables]

    def step(features):
        with tf.GradientTape() as tape:
            queries, keys = model(features, training=True), other(features, training=True)
            first = _first_row(tf.shape(features)[0])
            everyone = tfdist.global_batch.rows(keys)
            similar = tf.matmul(queries, everyone, transpose_b=True)
            places = first + tf.range(tf.shape(features)[0])
            terms = tf.nn.sparse_softmax_cross_entropy_with_logits(places, similar)
            loss = tf.reduce_sum(terms) / 7.0
            spread = tfdist.global_batch.total(tf.reduce_sum(queries, axis=0))
            # Each replica has the same penalty, of which it counts its share.
            loss += tf.reduce_sum(spread**2) / 100 / _replicas()
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    dataset, losses = tf.data.Dataset.from_tensor_slices(x).batch(7), []
    if strategy is None:
        losses = [float(step(batch)) for batch in dataset]
    else:

        @tf.function
        def distributed(batch):
            return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)

        for batch in strategy.experimental_distribute_dataset(dataset):
            losses.append(float(distributed(batch)))
    return {"weights": [v.numpy() for v in variables], "losses": losses}


def _first_row(own):
    if not tf.distribute.in_cross_replica_context() and tf.distribute.has_strategy():
        context = tf.distribute.get_replica_context()
        counts = context.all_gather(own[tf.newaxis], axis=0)
        return tf.reduce_sum(counts[: context.replica_id_in_sync_group])
    return 0


def _replicas():
    return float(tf.distribute.get_strategy().num_replicas_in_sync)


def means_by_hand(strategy):
    """In a `strategy.run` all replicas have the same weight; outside values stay as they are."""
    functions = (tfdist.global_batch.total, tfdist.global_batch.rows, tfdist.global_batch.mean)
    kept = [function(tf.ones([2])).numpy().tolist() for function in functions]

    def replica():
        rank = tf.distribute.get_replica_context().replica_id_in_sync_group
        return tfdist.global_batch.mean({"rank": rank, "none": None})["rank"]

    return kept, [float(v) for v in strategy.experimental_local_results(strategy.run(replica))]
