"""Steps whose programs are partitioned along the rows of a batch."""

from __future__ import annotations

import functools
import os
import pathlib
import tempfile

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.strategy.behaviours.common import cross_entropy, fit, outcome, rows, scope


def _root_mean_square(y, p):
    return keras.ops.sqrt(keras.ops.mean((y - p) ** 2))


def explained(strategy):
    """What a step with a loss of sums communicates, one that compares rows, and a normalization."""

    def negatives(y, p):
        scores = keras.ops.matmul(p, keras.ops.transpose(y))
        return -keras.ops.mean(keras.ops.diagonal(keras.ops.log_softmax(scores)))

    found = {}
    x = np.zeros((6, 4), "float32")
    steps = {"sums": _root_mean_square, "rows": negatives, "statistics": "mse"}
    for name, loss in steps.items():
        with scope(strategy):
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
            if name == "statistics":
                model.add(keras.layers.BatchNormalization())
            model.compile("sgd", loss)
        transfers = strategy.explain(model, (x, x[:, :3]))
        found[name] = [(t.kind, t.size, t.where) for t in transfers]
        found[f"{name}, reasons"] = [(t.operation, t.shape, t.reason) for t in transfers]
    return found


def lookup_of_one_row(strategy):
    """A worker without rows must not look up a made-up string."""
    with scope(strategy):
        inputs = keras.Input((1,), dtype="string")
        lookup = keras.layers.StringLookup(
            vocabulary=["a", "b", "c"], num_oov_indices=0, output_mode="one_hot"
        )
        model = keras.Model(inputs, keras.layers.Dense(1)(lookup(inputs)))
        model.compile("sgd", "mse")
    words = tf.constant([["a"], ["b"], ["c"], ["a"], ["b"]])
    data = tf.data.Dataset.from_tensor_slices((words, np.arange(5.0))).batch(2)
    history = model.fit(data, epochs=2, verbose=0).history
    return outcome(model, dict(history), predictions=model.predict(words[:1], verbose=0))


def summaries_and_prints(strategy):
    """A step that writes and prints what depends on the rows and on the update."""
    with tempfile.TemporaryDirectory() as folder:
        writer = tf.summary.create_file_writer(folder)

        class Telling(keras.Model):
            def train_step(self, data):
                logs = super().train_step(data)
                with writer.as_default(step=self.optimizer.iterations.value):
                    tf.summary.scalar("loss", logs["loss"])
                    tf.summary.scalar("sum", tf.reduce_sum(data[0]))
                    tf.summary.histogram("rows", data[0][:, 0])
                tf.print("sum of the rows", tf.reduce_sum(data[0]), output_stream=f"file://{said}")
                return {**logs, "rows": tf.shape(data[0])[0], "any": tf.reduce_any(data[0] > 1)}

        said = os.path.join(folder, "said")
        x, _ = rows(15)
        with scope(strategy):
            inputs = keras.Input((8,))
            model = Telling(inputs, keras.layers.Dense(1)(inputs))
            model.compile("adam", "mse")
        history = fit(model, x, x[:, :1], batch_size=15, shuffle=False)
        writer.flush()
        events = [os.path.join(folder, f) for f in os.listdir(folder) if "tfevents" in f]
        written = sum(
            len(event.summary.value) > 0 and event.summary.value[0].tag == "loss"
            for path in events
            for event in tf.compat.v1.train.summary_iterator(path)
        )
        told = pathlib.Path(said)
        lines = len(told.read_text().splitlines()) if told.exists() else 0
    return outcome(model, history), int(written), lines


def eagerly_on_the_whole_batch(strategy):
    """Root mean squares, eagerly: the step runs on the whole batch."""
    x, _ = rows(23)
    with scope(strategy):
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        )
        optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
        model.compile(optimizer, _root_mean_square, metrics=[_root_mean_square], run_eagerly=True)
    history = fit(model, x, x[:, :1], batch_size=7)
    evaluated = model.evaluate(x, x[:, :1], batch_size=7, verbose=0)
    return outcome(model, history, evaluated=evaluated, predictions=model.predict(x, verbose=0))


class ByShares(keras.layers.BatchNormalization):
    """Normalizes the rows of each share of a batch by themselves, in one process."""

    def __init__(self, shares: int, **settings):
        super().__init__(**settings)
        self.shares = shares

    def call(self, inputs, training=None, mask=None):
        if not training or self.synchronized:
            return super().call(inputs, training=training, mask=mask)
        count, rest = divmod(len(inputs), self.shares)
        own = [count + (share < rest) for share in range(self.shares)]
        outputs, mean, variance = [], 0.0, 0.0
        for part in tf.split(inputs, own):
            if len(part):
                weight = len(part) / len(inputs)
                its_mean, its_variance = tf.nn.moments(part, [0])
                scale = self.gamma * tf.math.rsqrt(its_variance + self.epsilon)
                outputs.append((part - its_mean) * scale + self.beta)
                mean += weight * its_mean
                variance += weight * its_variance
        for variable, value in ((self.moving_mean, mean), (self.moving_variance, variance)):
            variable.assign(variable * self.momentum + value * (1 - self.momentum))
        return tf.concat(outputs, 0)


def statistics_of_replicas(strategy, replicas, jit_compile=False):
    """Layers that normalize each replica's rows, and one that normalizes the whole batch."""
    if strategy is not None and len(strategy.extended.worker_devices) == replicas:
        strategy = tfdist.MirroredStrategy(batch_statistics="replica")
    elif strategy is not None:
        strategy = tfdist.MultiWorkerMirroredStrategy(batch_statistics="replica")
    own = functools.partial(ByShares, replicas) if strategy is None else _normalization
    x, y = rows(31)
    with scope(strategy):
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(6, activation="tanh"),
                own(momentum=0.5, epsilon=0.1),
                keras.layers.Dense(5),
                _normalization(synchronized=True),
                keras.layers.Dense(3),
            ]
        )
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.9),
            cross_entropy(),
            jit_compile=jit_compile and strategy is not None,
            run_eagerly=strategy is None,
        )
    history = fit(model, x, y, batch_size=15, shuffle=False, epochs=3)
    evaluated = model.evaluate(x, y, batch_size=15, verbose=0)
    return outcome(model, history, evaluated=evaluated, predictions=model.predict(x, verbose=0))


_normalization = keras.layers.BatchNormalization
