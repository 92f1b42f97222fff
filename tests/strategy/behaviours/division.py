"""Datasets whose preprocessing is divided among the workers."""

from __future__ import annotations

import functools
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.strategy.behaviours.common import compile_mlp, fit, outcome, rows


def _divides(behaviour, how="auto"):
    """Makes a behavior divide the preprocessing of its datasets."""

    @functools.wraps(behaviour)
    def divided(strategy):
        keras.utils.set_random_seed(1)
        if strategy is None:
            return behaviour(strategy)
        extended = strategy.extended
        with mock.patch.object(extended, "input_division", how):
            return behaviour(strategy)

    return divided


def _scale(x, y):
    return x * 2.0 - 0.5, y


def _elements(count):
    return tf.data.Dataset.from_tensor_slices(rows(count))


@_divides
def mapped(strategy):
    data = _elements(45).map(_scale).batch(20)
    model = compile_mlp(strategy)
    history = fit(model, data, epochs=3, validation_data=_elements(17).map(_scale).batch(5))
    predictions = model.predict(_elements(9).map(lambda x, y: x).batch(4), verbose=0)
    return outcome(model, history, predictions=predictions)


@_divides
def shuffled_and_repeated(strategy):
    data = _elements(45).map(_scale, num_parallel_calls=4).shuffle(20, seed=3).repeat().batch(8)
    model = compile_mlp(strategy)
    return outcome(model, fit(model, data.prefetch(4), epochs=3, steps_per_epoch=5))


@_divides
def zipped(strategy):
    x, y = rows(45)
    images = tf.data.Dataset.from_tensor_slices(x).map(lambda one: one * 2.0)
    labels = tf.data.Dataset.from_tensor_slices(y).map(lambda one: (one + 1) % 3)
    data = tf.data.Dataset.zip((images, labels)).shuffle(50, seed=1).batch(16)
    model = compile_mlp(strategy)
    return outcome(model, fit(model, data, epochs=2))


@_divides
def fewer_rows_than_workers(strategy):
    data = _elements(9).map(_scale).batch(8)
    model = compile_mlp(strategy)
    return outcome(model, fit(model, data, epochs=3))


@_divides
def several_steps_per_execution(strategy):
    data = _elements(45).map(_scale).batch(8)
    model = compile_mlp(strategy, steps_per_execution=3)
    return outcome(model, fit(model, data, epochs=2))


@_divides
def own_loop(strategy):
    data = _elements(45).map(_scale).batch(8)
    distributed = data if strategy is None else strategy.experimental_distribute_dataset(data)
    sums = []
    for x, _ in distributed:
        if strategy is None:
            sums.append(float(tf.reduce_sum(x)))
        else:
            parts = strategy.run(lambda part: tf.reduce_sum(part), args=(x,))
            total = strategy.reduce(tf.distribute.ReduceOp.SUM, parts, axis=None)
            sums.append(float(total))
    return {"sums": np.array(sums, np.float32)}


@_divides
def seeded_augmentation(strategy):
    def augment(number, element):
        x, y = element
        return x + tf.random.stateless_normal([8], [number, 7]), y

    data = _elements(45).enumerate().map(augment).batch(8)
    model = compile_mlp(strategy)
    return outcome(model, fit(model, data, epochs=2))


@_divides
def keras_layer(strategy):
    layer = keras.layers.Normalization(mean=0.5, variance=2.0)
    data = _elements(45).map(lambda x, y: (layer(x[None])[0], y)).batch(8)
    model = compile_mlp(strategy)
    return outcome(model, fit(model, data, epochs=2))


@_divides
def rows_processed(strategy):
    """Returns the rows that this worker has processed, apart from each epoch's first batch."""
    data = _elements(48).map(_scale).batch(8)
    model = compile_mlp(strategy)
    history = fit(model, data, epochs=2, callbacks=[tfdist.callbacks.ThroughputLogger()])
    report = strategy.extended.division.report()
    logged = history["preprocessed"]
    return {"rows": report.rows, "processed": report.processed, "logged": logged}


@functools.partial(_divides, how="always")
def depends_on_calls(strategy):
    """Trains on a map whose results depend on how often its function was called before."""
    calls = []

    def number(x):
        calls.append(None)
        return x * 0.0 + np.float32(len(calls) % 5)

    def numbered(x, y):
        return tf.ensure_shape(tf.numpy_function(number, [x], tf.float32), [8]), y

    data = _elements(24).map(numbered).batch(8)
    model = compile_mlp(strategy)
    try:
        fit(model, data, epochs=2)
    except tfdist.errors.UnsupportedError as error:
        return str(error)
    return ""


@_divides
def random_targets(strategy):
    """Trains with targets that differ between workers, which draw different numbers."""

    def draw(x, y):
        return x, tf.random.uniform([], 0, 3, tf.int64, seed=1)

    data = _elements(24).map(draw, num_parallel_calls=2).batch(8)
    model = compile_mlp(strategy)
    fit(model, data, epochs=2)
    return [weight.tolist() for weight in model.get_weights()]
