"""One process with several devices, and what a strategy is told of its communication."""

from __future__ import annotations

from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.harness.messages import messages_of
from tests.strategy.behaviours.common import compile_mlp, fit, outcome, rows, scope


def train(strategy, devices):
    """Trains under a MirroredStrategy of these devices; without any strategy in one process."""
    x, y = rows(45)
    mirrored = strategy and tfdist.MirroredStrategy(devices)
    model = compile_mlp(mirrored)
    history = fit(model, x, y, batch_size=20, validation_data=(x, y))
    evaluation = model.evaluate(x, y, verbose=0)
    return outcome(model, history, evaluation=evaluation, p=model.predict(x, verbose=0))


def replicas(strategy):
    """For some devices, how many replicas there are and where."""
    found = {}
    for devices in (None, ["CPU:1"], ["/CPU:1", "CPU:0"]):
        mirrored = tfdist.MirroredStrategy(devices)
        places = mirrored.extended.worker_devices
        found[str(devices)] = [place.rsplit("/", 1)[-1] for place in places]
        assert mirrored.num_replicas_in_sync == len(places)
    return found


def reduced_by(strategy):
    """The sum outside of replicas goes through the CrossDeviceOps that was given."""
    given = tf.distribute.ReductionToOneDevice()
    mirrored = tfdist.MirroredStrategy(cross_device_ops=given)
    values = mirrored.experimental_distribute_values_from_function(
        lambda context: tf.constant(3.0 + context.replica_id_in_sync_group)
    )
    with mock.patch.object(given, "reduce", wraps=given.reduce) as reduce:
        total = mirrored.reduce("sum", values, axis=None)
    return float(total), reduce.call_count


def small_packs(strategy, bytes_per_pack):
    """Trains with packs of so many bytes; and in how many collectives."""
    if strategy:
        options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=bytes_per_pack)
        strategy = tfdist.MultiWorkerMirroredStrategy(communication_options=options)
    x, y = rows(20)
    model = compile_mlp(strategy)
    fit(model, x, y, epochs=1, batch_size=20)
    before = _collectives(strategy)
    fit(model, x, y, epochs=1, batch_size=20)
    return outcome(model), _collectives(strategy) - before


def _collectives(strategy):
    return strategy.extended.workers.traffic().collectives if strategy else 0


def another_implementation(strategy):
    """What is said of an implementation that the native collectives do not have."""
    implementation = tf.distribute.experimental.CommunicationImplementation.NCCL
    options = tf.distribute.experimental.CommunicationOptions(implementation=implementation)
    with messages_of("multi_worker") as lines:
        tfdist.MultiWorkerMirroredStrategy(communication_options=options)
    return lines


def another_timeout(strategy):
    """What is said of timeouts for strategies after the first."""
    with messages_of("group") as lines:
        for seconds in (strategy.extended.group.options.collective_timeout, 7.0, 8.0):
            options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=seconds)
            tfdist.MultiWorkerMirroredStrategy(communication_options=options)
    return lines


def weights_everywhere(strategy):
    """Each device holds the same weights after training."""
    mirrored = tfdist.MirroredStrategy()
    model = compile_mlp(mirrored)
    fit(model, *rows(45), batch_size=20)
    copies = [[np.array(c) for c in v.value.values] for v in model.trainable_variables]
    return all(np.array_equal(one, other) for one, other in copies)


class _Outside(keras.layers.Layer):
    """Uses and changes state that was created outside of the strategy's scope."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.calls = kind, 0
        self.state = {
            "variable": lambda: tf.Variable(0.0),
            "keras variable": lambda: keras.Variable(0.0, trainable=False),
            "seeds": lambda: keras.random.SeedGenerator(3),
            "generator": lambda: tf.random.Generator.from_seed(3),
            "table": lambda: tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0),
            "table of rows": lambda: tf.lookup.experimental.MutableHashTable(
                tf.int64, tf.float32, 0.0
            ),
            "loop": lambda: tf.Variable(0.0),
            "function": lambda: tf.Variable(0.0),
            "compiled": lambda: tf.Variable(0.0),
            "python": lambda: None,
        }[kind]()

    def call(self, x):
        return x + 0.1 * getattr(self, f"_by_{self.kind.replace(' ', '_')}")(x)

    def _by_variable(self, x):
        self.state.assign_add(tf.reduce_mean(x))
        return tf.identity(self.state)

    def _by_keras_variable(self, x):
        self.state.assign(self.state + tf.reduce_mean(x))
        return self.state

    def _by_seeds(self, x):
        return keras.random.dropout(x, 0.3, seed=self.state) + keras.random.normal(
            tf.shape(x), seed=self.state
        )

    def _by_generator(self, x):
        return self.state.normal(tf.shape(x))

    def _by_table(self, x):
        key = tf.zeros([1], tf.int64)
        self.state.insert(key, self.state.lookup(key) + 1.0)
        return tf.ensure_shape(self.state.lookup(key), [1])

    def _by_table_of_rows(self, x):
        keys = tf.cast(10 * x[:, 0], tf.int64)
        before = self.state.lookup(keys)
        self.state.insert(keys, before + 1.0)
        return tf.reshape(self.state.lookup(keys) - 0.5 * before, [-1, 1])

    def _by_loop(self, x):
        def again(i, z):
            self.state.assign_add(tf.reduce_mean(z))
            return i + 1, z + self.state

        return tf.while_loop(lambda i, z: i < 3, again, (0, x))[1]

    def _by_function(self, x):
        return tf.function(self._by_variable)(x)

    def _by_compiled(self, x):
        return tf.function(self._by_variable, jit_compile=True)(x) + tf.zeros_like(x)

    def _by_python(self, x):
        def count():
            self.calls += 1
            return np.float32(self.calls)

        return tf.ensure_shape(tf.numpy_function(count, [], tf.float32), [])

    def compute_output_shape(self, shape):
        return shape


def state_outside(strategy, kind):
    """Trains and predicts with a layer that changes what all replicas of the process share."""
    x, y = rows(22)
    layer = _Outside(kind)
    with scope(strategy):
        model = keras.Sequential([keras.Input((8,)), layer, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    history = fit(model, x, y, batch_size=11, shuffle=False)
    return outcome(model, history, p=model.predict(x, batch_size=11, verbose=0))


def elements_of_a_variable(strategy):
    """Reads and writes elements of a variable, in steps and outside of them."""
    x, y = rows(22)

    class Model(keras.Sequential):
        def train_step(self, data):
            logs = super().train_step(data)
            self.change(tf.reduce_mean(data[0], axis=0)[:1])
            read = tf.concat([self.v.gather_nd([[1], [2]]), self.v.sparse_read([0, 3])], axis=0)
            return logs | {"read": tf.reduce_sum(read)}

        def change(self, value):
            for i, kind in enumerate(("add", "sub", "update", "max", "min")):
                getattr(self.v, f"scatter_nd_{kind}")([[i % 4]], value * (i + 1))
            self.v.batch_scatter_update(tf.IndexedSlices(value, tf.constant([5])))

    with scope(strategy):
        model = Model([keras.Input((8,)), keras.layers.Dense(1)])
        model.v = tf.Variable(tf.ones([6]), trainable=False)
        model.compile(keras.optimizers.SGD(0.01), "mse")
    history = fit(model, x, y, batch_size=11, shuffle=False)
    model.change(tf.constant([0.25]))
    copies = [v.numpy() for v in getattr(model.v, "values", [model.v])]
    assert all(np.array_equal(copies[0], copy) for copy in copies)
    return outcome(model, history, v=copies[0])
