"""Scripts as people write them: all of one inside the strategy's scope."""

from __future__ import annotations

import os
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from tests.strategy.behaviours.common import cross_entropy, fit, mlp, outcome, rows, scope
from tfdist.errors import RendezvousError


def _compiled(optimizer: str = "adam") -> keras.Model:
    model = mlp()
    model.compile(optimizer, cross_entropy(), metrics=["accuracy"])
    return model


def save_in_scope(strategy, folder):
    x, y = rows(40)
    with scope(strategy):
        model = _compiled()
        fit(model, x, y, batch_size=10)
        model.save(f"{folder}/model.keras")
        model.save(f"{folder}/model.h5")
        model.save_weights(f"{folder}/model.weights.h5")
        model.export(f"{folder}/exported", verbose=False)
        again = keras.models.load_model(f"{folder}/model.keras")
        history = fit(again, x, y, batch_size=10)
    return outcome(again, history, files=sorted(os.listdir(folder)))


def callbacks_in_scope(strategy, folder):
    x, y = rows(40)
    callbacks = [
        keras.callbacks.ModelCheckpoint(f"{folder}/{{epoch}}.keras", save_best_only=True),
        keras.callbacks.BackupAndRestore(f"{folder}/backup", delete_checkpoint=False),
        keras.callbacks.CSVLogger(f"{folder}/log.csv"),
        keras.callbacks.TensorBoard(f"{folder}/board", write_graph=False),
    ]
    with scope(strategy):
        model = _compiled()
        history = fit(
            model, x, y, batch_size=10, epochs=3, validation_data=(x, y), callbacks=callbacks
        )
        best = keras.models.load_model(f"{folder}/3.keras")
    return outcome(model, history, best=best.get_weights(), files=sorted(os.listdir(folder)))


def session_cleared_in_scope(strategy):
    """As scripts do between two models."""
    x, y = rows(40)
    with scope(strategy):
        first = _compiled()
        history = [fit(first, x, y, batch_size=10)]
        keras.backend.clear_session()
        keras.utils.set_random_seed(2)
        second = _compiled()
        history.append(fit(second, x, y, batch_size=10))
    return outcome(second, history, outside=not tf.distribute.has_strategy())


class LateModel(keras.Model):
    """Makes in its first step a generator of seeds and an optimizer, and builds a layer."""

    def __init__(self):
        super().__init__()
        self.network = mlp()
        self.head = keras.layers.Dense(1, name="head")
        self.head_optimizer = None
        self.size = keras.metrics.Mean(name="size")

    def call(self, x, training=False):
        return self.network(x)

    def train_step(self, data):
        x, y = data
        if self.head_optimizer is None:
            self.head_optimizer = keras.optimizers.Adam(0.01)
        x += 0.1 * keras.random.normal(keras.ops.shape(x))
        with tf.GradientTape(persistent=True) as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(x, y, outputs)
            guess = self.head(outputs)
            other = keras.ops.mean(keras.ops.square(guess[:, 0] - keras.ops.cast(y, "float32")))
        weights = self.network.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        weights = self.head.trainable_weights
        self.head_optimizer.apply(tape.gradient(other, weights), weights)
        self.size.update_state(keras.ops.sum(keras.ops.square(outputs), axis=-1))
        return {"loss": loss, "other": other, "size": self.size.result()}


def made_in_the_first_step(strategy, count=46):
    x, y = rows(count)
    with scope(strategy):
        model = LateModel()
        model.compile("sgd", cross_entropy())
    history = fit(model, x, y, batch_size=15)
    state = [v.numpy() for v in model.head_optimizer.variables]
    return outcome(model, history, state=state)


def noise_without_a_seed(strategy):
    """Keras's generator of seeds for all draws that have none is made when it is first used."""

    class Noisy(keras.layers.Layer):
        def call(self, x, training=False):
            if not training:
                return x
            kept = keras.random.dropout(x, 0.5)
            return kept + keras.random.uniform(keras.ops.shape(x)) * keras.random.normal((1, 8))

    x, y = rows(40)
    with scope(strategy):
        model = keras.Sequential([keras.Input((8,)), Noisy(), keras.layers.Dense(3)])
        model.compile("sgd", cross_entropy())
    return outcome(model, fit(model, x, y, batch_size=10))


def noise_in_batches_of_fixed_size(strategy):
    x, y = rows(48)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(12, drop_remainder=True)
    with scope(strategy):
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dropout(0.3),
                keras.layers.GaussianNoise(0.1),
                keras.layers.Dense(3),
            ]
        )
        model.compile("sgd", cross_entropy())
    return outcome(model, fit(model, data))


class QuadrupleModel(keras.Model):
    """Batches of four parts, which Keras cannot build its metrics with before the first step."""

    def __init__(self):
        super().__init__()
        self.network = mlp()

    def call(self, x, training=False):
        return self.network(x)

    def train_step(self, data):
        x, y, weight, _ = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(x, y, outputs, weight)
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return self.compute_metrics(x, y, outputs, weight)


def metrics_built_in_the_first_step(strategy):
    def certainty(y, outputs):
        return keras.ops.mean(keras.ops.max(outputs, axis=-1))

    x, y = rows(5)
    weight = np.linspace(0.5, 1.5, 5).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, y, weight, x)).batch(1)
    with scope(strategy):
        model = QuadrupleModel()
        model.compile("sgd", cross_entropy(), metrics=[certainty, "accuracy"])
    return outcome(model, fit(model, data))


class TripletModel(keras.Model):
    """A model whose batches only its own step knows, as in Keras's example of a Siamese network."""

    def __init__(self):
        super().__init__()
        embedding = mlp()
        inputs = [keras.Input((8,)) for _ in range(3)]
        a, p, n = (embedding(i) for i in inputs)
        near = keras.ops.sum(keras.ops.square(a - p), axis=-1)
        far = keras.ops.sum(keras.ops.square(a - n), axis=-1)
        self.network = keras.Model(inputs, [near, far])
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def call(self, inputs):
        return self.network(inputs)

    def _loss(self, data):
        near, far = self.network(data)
        return keras.ops.mean(keras.ops.maximum(near - far + 0.5, 0.0))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self._loss(data)
        weights = self.network.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def test_step(self, data):
        self.tracker.update_state(self._loss(data))
        return {"loss": self.tracker.result()}


def batches_that_only_the_step_knows(strategy):
    parts = [rows(44, seed=seed)[0] for seed in range(3)]
    data = tf.data.Dataset.from_tensor_slices(tuple(parts)).batch(16)
    with scope(strategy):
        model = TripletModel()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
    history = fit(model, data, validation_data=data)
    return outcome(model, history)


def made_by_one_worker_alone(strategy):
    """What is said where the others do not come to make a variable too."""
    line = "exchange 'variable' timed out after 600 s waiting for 1 of 2 workers."
    missing = RendezvousError(line)
    session = strategy.extended.group.session
    with strategy.scope(), mock.patch.object(session, "exchange", side_effect=missing):
        try:
            keras.layers.Dense(1, name="probe").build((None, 4))
        except RendezvousError as error:
            return str(error)


def _residual() -> keras.Model:
    """Its sum takes a second term of no static rows for a bias."""
    inputs = keras.Input((8,))
    x = keras.layers.Dense(8, activation="tanh")(inputs)
    x = keras.layers.Add()([x, keras.layers.Dense(8)(x)])
    return keras.Model(inputs, keras.layers.Dense(3)(x))


def fewer_rows_than_replicas(strategy):
    x, y = rows(7)
    with scope(strategy):
        model = _residual()
        model.compile("sgd", cross_entropy(), metrics=["accuracy"])
    first = model.predict(x[:1], verbose=0)
    logs = [model.evaluate(x[:1], y[:1], verbose=0), model.train_on_batch(x[:1], y[:1])]
    rest = model.predict(tf.data.Dataset.from_tensor_slices(x).batch(3), verbose=0)
    short = model.predict_on_batch(x[:1])
    logs += [np.asarray(variable.value) for variable in model.metrics[0].variables]
    return outcome(model, predictions=[first, rest, short], logs=logs)


def batches_of_fixed_size_that_do_not_divide(strategy):
    x, y = rows(11)
    with scope(strategy):
        model = _residual()
        model.compile("sgd", cross_entropy(), metrics=["accuracy"])

    def fixed(size):
        data = tf.data.Dataset.from_tensor_slices((x, y))
        return data.batch(size, drop_remainder=True)

    history = [fit(model, fixed(size)) for size in (1, 3, 4)]
    logs = [model.evaluate(fixed(size), verbose=0) for size in (1, 3)]
    return outcome(model, history, logs=logs, predictions=model.predict(fixed(1), verbose=0))


def stateful_layers(strategy):
    """Layers with a state for each row, whose number they must know, in batches of any size."""
    x = np.random.default_rng(0).normal(size=(12, 4, 3)).astype("float32")
    result = {}
    for size in (1, 3, 5):
        with scope(strategy):
            layers = [keras.Input(batch_shape=(size, 4, 3)), keras.layers.LSTM(3, stateful=True)]
            layers += [keras.layers.BatchNormalization(), keras.layers.Dense(2)]
            model = keras.Sequential(layers)
            model.compile(keras.optimizers.Adam(0.02, epsilon=1e-3), "mse", metrics=["mae"])
        data = tf.data.Dataset.from_tensor_slices((x, x[:, 0, :2])).batch(size, drop_remainder=True)
        history = fit(model, data)
        logs = [model.evaluate(data, verbose=0), model.train_on_batch(x[:size], x[:size, 0, :2])]
        predictions = [model.predict(data, verbose=0), model.predict_on_batch(x[:size])]
        predictions.append(model.predict(x[: 2 * size], batch_size=size, verbose=0))
        result[size] = outcome(model, history, logs=logs, predictions=predictions)
    weights = [w for each in result.values() for w in each.pop("weights")]
    return {"weights": weights, "results": list(result.values())}


def predictions_by_size(strategy):
    """A layer that divides by the number of rows if it knows it, while others are evaluated."""

    class Share(keras.layers.Layer):
        def call(self, x):
            return x / float(x.shape[0] or -1)

    class Evaluating(keras.callbacks.Callback):
        def on_predict_batch_end(self, batch, logs=None):
            logs_of_others.append(model.evaluate(fixed(5), verbose=0))

    x, y = rows(23)
    logs_of_others = []

    def fixed(size):
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(size, drop_remainder=True)

    with scope(strategy):
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3), Share()])
        model.compile("sgd", cross_entropy())
    predictions = [model.predict(fixed(7), verbose=0, callbacks=[Evaluating()])]
    for size in (1, 4, 7):  # The last of these batches has another size.
        model.make_predict_function(force=True)
        predictions.append(model.predict(x, batch_size=size, verbose=0))
    model.make_predict_function(force=True)
    predictions += [model.predict_on_batch(x[:size]) for size in (3, 2)]
    return {"weights": model.get_weights(), "predictions": predictions, "logs": logs_of_others}


def sizes_that_are_traced(strategy):
    """The numbers of rows that a model knows while its steps are traced."""
    seen = set()

    class Spy(keras.layers.Layer):
        def call(self, x):
            seen.add(x.shape[0])
            return x

    x, y = rows(12)
    with scope(strategy):
        model = keras.Sequential([keras.Input((8,)), Spy(), keras.layers.Dense(3)])
        model.compile("sgd", cross_entropy())
    seen.clear()
    for size in (1, 2, 3, 4):
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(size, drop_remainder=True)
        fit(model, data, epochs=1)
        model.evaluate(x[:size], y[:size], verbose=0)
        model.predict(x[:size], verbose=0)
        model.train_on_batch(x[:size], y[:size])
        model.make_train_function(force=True)
        model.make_test_function(force=True)
        model.make_predict_function(force=True)
    return sorted(size for size in seen if size is not None)


def loop_without_run(strategy):
    """A loop as it is written for one process."""
    x, y = rows(8)
    with scope(strategy):
        model = mlp()
        with tf.GradientTape() as tape:
            loss = cross_entropy()(y, model(x, training=True))
        try:
            tape.gradient(loss, model.trainable_weights)
        except ValueError as error:
            return str(error)


def _convolutions() -> keras.Model:
    """Two in a row: TensorFlow's fused kernels for CPUs take no batch of no rows."""
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Reshape((8, 1)),
            keras.layers.Conv1D(4, 3, activation="relu"),
            keras.layers.Conv1D(4, 3),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Dropout(0.2),
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
    )


def convolutions_of_no_rows(strategy, eagerly):
    x, y = rows(5)
    with scope(strategy):
        model = _convolutions()
        model.compile("sgd", cross_entropy(), metrics=["accuracy"], run_eagerly=eagerly)
    history = fit(model, x, y, batch_size=4)
    data = tf.data.Dataset.from_tensor_slices((x, y, np.arange(1.0, 6.0))).batch(1)
    logs = [fit(model, data), model.evaluate(data, verbose=0)]
    return outcome(model, history, logs=logs, predictions=model.predict(x, batch_size=4, verbose=0))


def embeddings_of_no_rows(strategy):
    """Adam takes the slices of one row one by one, so even those of zeros would count."""
    x, y = rows(5)
    x = np.abs(x * 4).astype("int32")
    with scope(strategy):
        model = keras.Sequential(
            [
                keras.Input((8,), dtype="int32"),
                keras.layers.Embedding(20, 4, mask_zero=True),
                keras.layers.LSTM(4),
                keras.layers.Dense(3),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01), cross_entropy())
    return outcome(model, fit(model, x, y, batch_size=4))
