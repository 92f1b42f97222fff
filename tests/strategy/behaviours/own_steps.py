"""Steps of a model's own: what they return, draw and read."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.strategy.behaviours.common import batches, cross_entropy, fit, outcome, rows, scope


def one_number_per_batch(strategy):
    """A `predict_step` whose results have no rows."""

    class Mean(keras.Model):
        def predict_step(self, data):
            return tf.reduce_mean(super().predict_step(data), keepdims=True)[0]

    x, _ = rows(15)
    with scope(strategy):
        inputs = keras.Input((8,))
        model = Mean(inputs, keras.layers.Dense(3)(inputs))
    predictions = model.predict(x, batch_size=6, verbose=0)
    assert predictions.shape == (3,)
    return outcome(model, predictions=predictions, on_batch=model.predict_on_batch(x))


def noise_in_predictions(strategy):
    """Dropout that is active in `predict` as well, as for estimates of uncertainty."""

    class Active(keras.layers.Dropout):
        def call(self, inputs, training=False):
            return super().call(inputs, training=True)

    x, y = rows(15)
    with scope(strategy):
        layers = [keras.layers.Dense(6), Active(0.5, seed=3), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        model.compile("sgd", cross_entropy())
    drawn = [model.predict(x, batch_size=6, verbose=0) for _ in range(2)]
    assert not np.allclose(*drawn)
    drawn.append(model.predict_on_batch(x))
    history = fit(model, x, y, batch_size=6)
    return outcome(model, history, drawn=drawn, after=model.predict(x, batch_size=4, verbose=0))


def logs_of_evaluate(strategy):
    """Counts, truths and a row's number, some of them in a dict, also under a metric's name."""

    class Counting(keras.Model):
        def _logs(self, data):
            x, y = data
            wrong = tf.cast(y != 1, "int32")
            return {
                "rows": tf.shape(x)[0],
                "accuracy": tf.reduce_sum(wrong),
                "of batch": {"any": tf.reduce_any(x > 2), "all": tf.reduce_all(y >= 0)},
                "row": x[3, 0],
            }

        def train_step(self, data):
            return super().train_step(data) and self._logs(data)

        def test_step(self, data):
            return super().test_step(data) and self._logs(data)

    seen = []

    class See(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(tf.nest.map_structure(lambda value: np.asarray(value).item(), logs))

        on_test_batch_end = on_train_batch_end

    x, y = rows(15)
    with scope(strategy):
        inputs = keras.Input((8,))
        model = Counting(inputs, keras.layers.Dense(3)(inputs))
        model.compile("sgd", cross_entropy(), metrics=["accuracy"])
    data = batches(x, y, 7).take(2)  # A batch of one row has no fourth one.
    model.fit(data, epochs=1, verbose=0, callbacks=[See()])
    model.evaluate(data, verbose=0, callbacks=[See()])
    assert [logs["rows"] for logs in seen] == [7, 7, 7, 7]
    return outcome(model, seen=seen)


def traces_that_decide_otherwise(strategy, first):
    """A step that reads its optimizer's iterations for batches of one shape only.

    Args:
        strategy: none for one process.
        first: the length of the first batch's rows, which is 5 or 3; those of 3 read them.
    """

    class Reading(keras.Model):
        def train_step(self, data):
            logs = super().train_step(data)
            self.count.assign_add(1.0)
            # Traced for the length 5, or for any other one, which may serve for 5 as well.
            read = data[0].shape[1] != 5
            steps = tf.cast(self.optimizer.iterations, "float32") if read else self.count + 0.0
            return {**logs, "steps": steps}

    generator = np.random.default_rng(0)
    with scope(strategy):
        inputs = keras.Input((None, 4))
        hidden = keras.layers.GlobalAveragePooling1D()(inputs)
        model = Reading(inputs, keras.layers.Dense(3)(hidden))
        model.count = tf.Variable(0.0, trainable=False)
        model.compile(keras.optimizers.Adam(0.02), cross_entropy(), metrics=["accuracy"])
    logs = []
    for length in (first, 8 - first, first, 8 - first):
        x = generator.normal(size=(7, length, 4)).astype("float32")
        logs.append(model.train_on_batch(x, np.arange(7) % 3, return_dict=True))
    assert [log["steps"] for log in logs] == [1, 2, 3, 4]
    return outcome(model, [{name: float(v) for name, v in log.items()} for log in logs])
