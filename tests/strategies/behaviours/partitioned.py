"""Steps whose programs are partitioned along the rows of a batch."""

from __future__ import annotations

import os
import pathlib
import tempfile

import keras
import numpy as np
import tensorflow as tf

from tests.strategies.behaviours.common import fit, outcome, rows, scope


def _root_mean_square(y, p):
    return keras.ops.sqrt(keras.ops.mean((y - p) ** 2))


def explained(strategy):
    """What a step with a loss of sums communicates, and one that compares rows."""

    def negatives(y, p):
        scores = keras.ops.matmul(p, keras.ops.transpose(y))
        return -keras.ops.mean(keras.ops.diagonal(keras.ops.log_softmax(scores)))

    found = {}
    x = np.zeros((6, 4), "float32")
    for name, loss in {"sums": _root_mean_square, "rows": negatives}.items():
        with scope(strategy):
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
            model.compile("sgd", loss)
        transfers = strategy.explain(model, (x, x[:, :3]))
        found[name] = [(t.kind, t.size, t.where) for t in transfers]
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
