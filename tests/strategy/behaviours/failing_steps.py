"""Steps that fail on one worker; each behaviour returns what that worker and the others say."""

from __future__ import annotations

import functools
import time

import keras
import numpy as np
import tensorflow as tf

import tfdist

ROWS = 32


@keras.saving.register_keras_serializable("failing steps")
class Wears(keras.layers.Layer):
    """Raises in its nth call where it wears, in NumPy."""

    def __init__(self, wears, count=4, **kwargs):
        super().__init__(**kwargs)
        self._wears, self._count, self._calls = wears, count, 0

    def get_config(self):
        return {"name": self.name}  # Workers compare the configurations of layers.

    def call(self, x):
        # All workers have this function, since they compare their programs.
        with tf.control_dependencies([x]):
            passed = tf.numpy_function(self._pass_on, [], tf.int32)
        with tf.control_dependencies([passed]):
            return tf.identity(x)

    def _pass_on(self):
        self._calls += 1
        if self._wears and self._calls >= self._count:
            raise ValueError("this layer is worn out")
        return np.int32(0)


def said(function, *args):
    """What a call raises, and how long it takes to."""
    began = time.monotonic()
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "no error", time.monotonic() - began


def model_of(strategy, **arguments):
    with strategy.scope():
        layers = [keras.layers.Dense(4), Wears(strategy.extended.group.topology.rank == 1)]
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
        model.compile("sgd", "mse", **arguments)
    return model


def data(rows=ROWS):
    x = np.ones((rows, 4), "float32")
    return x, x[:, :1]


def fit(strategy, **arguments):
    model = model_of(strategy, **arguments)
    return said(functools.partial(model.fit, *data(), batch_size=4, verbose=0))


def in_a_graph(strategy):
    return fit(strategy)


def eagerly(strategy):
    return fit(strategy, run_eagerly=True)


def several_steps_at_once(strategy):
    return fit(strategy, steps_per_execution=3)


def own_loop(strategy, kind):
    """A training loop of one's own; worker 1 fails before its gradients are summed."""
    model = model_of(strategy)
    optimizer = model.optimizer
    x, y = (tf.constant(v) for v in data(4))

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    def step():
        return strategy.run(replica_step, (x, y))

    @tf.function
    def loop():
        for _ in tf.range(8):
            step()

    def python_loop(step):
        for _ in range(8):
            step()

    loops = {
        "a loop in a function": loop,
        "a function per step": functools.partial(python_loop, tf.function(step)),
        "eager": functools.partial(python_loop, step),
    }
    return said(loops[kind])


def beside_a_collective(strategy, kind):
    """Worker 1's own function fails while its collective waits for worker 0, who is not there."""
    group = strategy.extended.group

    def fail(x):
        raise ValueError("this disk is full")

    @tf.function
    def function(x):
        total = tfdist.collective.all_reduce(x)
        if kind == "while it is traced":
            raise ValueError("this disk is full")
        if kind == "in a loop":
            for _ in tf.range(3):
                total += tf.ensure_shape(tf.numpy_function(fail, [x], x.dtype), [3])
        else:
            total += tf.numpy_function(fail, [x], x.dtype)
        return total

    here = said(function, tf.ones([3])) if group.topology.rank == 1 else None
    group.exchange("worker 1 has failed", "")
    return here or said(tfdist.collective.all_reduce, tf.ones([3]))


def alike_on_all(strategy):
    """All workers fail in the same step, before they wait for one another: they can go on."""
    model = model_of(strategy)
    x, y = data(4)
    refused = [said(model.fit, x[:, :3], y, 4, 1, 0)[0] for _ in range(2)]

    @tf.function
    def step(x):
        check = tf.debugging.assert_less(tf.reduce_sum(x), 10.0, "too much")
        with tf.control_dependencies([check]):
            x = tf.identity(x)
        return tfdist.collective.all_reduce(x)

    refused += [said(step, tf.fill([3], value))[0] for value in (100.0, 200.0)]
    return refused, step(tf.ones([3])).numpy().tolist()


def at_the_end_of_the_data(strategy):
    """The function runs into it while a sum of the last step waits; the next epoch goes on."""
    group = strategy.extended.group
    dataset = tf.data.Dataset.range(1, 3, output_type=tf.float32)

    @tf.function
    def epoch(iterator, total):
        for _ in tf.range(4):
            value = next(iterator)
            # Not before the other worker has come to the end.
            total += tfdist.collective.all_reduce(value)
        return total

    ended = []
    for _ in range(3):
        ended.append(said(epoch, iter(dataset), tf.zeros([]))[0].split(":")[0])
    group.exchange("the last epoch has ended", "")
    return ended, float(tfdist.collective.all_reduce(1.0))
