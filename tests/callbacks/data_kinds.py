"""Kinds of data that a training may be resumed on: `fit`'s arguments for some rows."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

ROWS, BATCH = 46, 8  # Five full batches and a smaller one.


def seeded_dataset(x, y):
    return {"x": tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS, seed=3).batch(BATCH)}


def shuffled_twice(x, y):
    half = len(x) // 2
    data = tf.data.Dataset.from_tensor_slices((x[:half], y[:half])).shuffle(8, seed=5)
    return {"x": data.repeat(2).batch(BATCH)}


def cached(x, y):
    return {"x": tf.data.Dataset.from_tensor_slices((x, y)).shuffle(8, seed=5).batch(BATCH).cache()}


class Turning(keras.utils.PyDataset):
    """Does something at the beginning of each epoch, and at its end."""

    def __init__(self, x, y):
        super().__init__()
        self._x, self._y, self._turn = x, y, 0

    def __len__(self):
        return -(-len(self._x) // BATCH)

    def __getitem__(self, index):
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return np.roll(self._x, self._turn, 0)[rows], np.roll(self._y, self._turn, 0)[rows]

    def on_epoch_begin(self):
        self._turn = 3 * self._turn + 1

    def on_epoch_end(self):
        self._turn += 2


def turning(x, y):
    return {"x": Turning(x, y)}


def arrays(x, y):
    return {"x": x, "y": y, "batch_size": BATCH}


def smaller_batches(x, y):
    return {"x": x, "y": y, "batch_size": BATCH // 2}


def weighted(x, y):
    return {**arrays(x, y), "sample_weight": abs(x[:, 0])}


def generator(x, y):
    def batches():
        for start in range(0, ROWS, BATCH):
            yield x[start : start + BATCH], y[start : start + BATCH]

    specs = tf.TensorSpec([None, *x.shape[1:]]), tf.TensorSpec([None, *y.shape[1:]])
    return {"x": tf.data.Dataset.from_generator(batches, output_signature=specs)}


def repeated(x, y):
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS, seed=3).batch(BATCH)
    return {"x": dataset.repeat(), "steps_per_epoch": 6}


def finite_steps(x, y):
    return {**seeded_dataset(x, y), "steps_per_epoch": 6}


def augmented(x, y):
    def noisy(x, y):
        return x + tf.random.normal(tf.shape(x), stddev=0.1, seed=5), y

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS, seed=3).batch(BATCH)
    return {"x": dataset.map(noisy)}


def python_generator(x, y):
    def batches():
        while True:
            for start in range(0, ROWS, BATCH):
                yield x[start : start + BATCH], y[start : start + BATCH]

    return {"x": batches(), "steps_per_epoch": 6}


DATA = {
    f.__name__: f
    for f in (
        seeded_dataset,
        shuffled_twice,
        cached,
        turning,
        arrays,
        smaller_batches,
        weighted,
        generator,
        repeated,
        finite_steps,
        augmented,
        python_generator,
    )
}


def validation_of(kind, data, x, y):
    """The arguments of `fit` for a kind of validation data; `data` are those for training."""
    held_out = {"validation_data": (x[:10], y[:10]), "validation_batch_size": 5}
    if kind == "held out":
        return held_out
    whole = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=6)
    if kind == "split":  # from one dataset, that is shuffled anew in each epoch
        data["x"] = whole.skip(10).batch(8)
    shuffled = {"validation_data": whole.take(10).batch(5)}
    return {**shuffled, "validation_steps": 1} if kind == "part" else shuffled
