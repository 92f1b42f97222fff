"""What ranks do in the tests of failures."""

from __future__ import annotations

import os

import keras
import numpy as np
import tensorflow as tf

import tfdist


@keras.saving.register_keras_serializable("tests")
class FailsAt(keras.layers.Layer):
    """Raises when it is run for the nth time."""

    def __init__(self, count, **kwargs):
        super().__init__(**kwargs)
        self.count = count

    def build(self, shape):
        self.calls = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def call(self, x):
        self.calls.assign(self.calls + 1)
        calls = tf.convert_to_tensor(self.calls)
        check = tf.debugging.assert_less(calls, self.count, "this layer is worn out")
        with tf.control_dependencies([check]):
            return tf.identity(x)


class FailsToBuild(keras.layers.Layer):
    """Raises when training is traced."""

    def call(self, x, training=None):
        if training:
            raise ValueError("this layer cannot be trained")
        return x


def model(*layers):
    """A chain of dense layers, and others before the last one."""
    dense = keras.layers.Dense
    first = [keras.Input((4,)), dense(8, name="first"), dense(8, name="second")]
    return lambda: keras.Sequential([*first, *layers, dense(1, name="last")])


def fit(strategy, layers=(), rows=24, callbacks=(), cuts=("first",), **arguments):
    """Trains on two ranks, the last layers on the second."""
    keras.utils.set_random_seed(0)
    strategy = tfdist.PipelineStrategy(microbatches=2)
    with strategy.scope():
        pipeline = tfdist.PipelineModel(model(*layers), cuts=cuts)
        pipeline.compile("sgd", "mse", **arguments)
    x = np.ones((rows, 4), "float32")
    pipeline.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=list(callbacks))


def a_layer_fails(strategy):
    """At the third step."""
    fit(strategy, [FailsAt(6)])


def a_layer_cannot_be_traced(strategy):
    """Before the first step."""
    fit(strategy, [FailsToBuild()])


def a_worker_dies(strategy):
    """After two steps."""
    pipeline_rank = tfdist.PipelineStrategy(microbatches=2).pipeline_rank

    def die(batch, logs):
        if pipeline_rank == 1 and batch == 1:
            os._exit(3)

    fit(strategy, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=die)])


def different_data(strategy):
    """The second worker has more."""
    pipeline_rank = tfdist.PipelineStrategy(microbatches=2).pipeline_rank
    fit(strategy, rows=24 + 8 * pipeline_rank)


def refuse(strategy):
    """What is told at once; returns the messages."""

    class OwnStep(keras.Sequential):
        def train_step(self, data):
            return {}

    def message(function):
        try:
            function()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was raised"

    def outside():
        tfdist.PipelineModel(model())

    def own_step():
        with tfdist.PipelineStrategy().scope():
            tfdist.PipelineModel(OwnStep([keras.Input((4,)), keras.layers.Dense(1)]))

    def no_model():
        with tfdist.PipelineStrategy().scope():
            tfdist.PipelineModel("a model")

    def called():
        with tfdist.PipelineStrategy().scope():
            tfdist.PipelineModel(model())(np.ones((2, 4), "float32"))

    return {
        "called": message(called),
        "outside": message(outside),
        "size": message(lambda: tfdist.HybridStrategy(pipeline_size=3)),
        "microbatches": message(lambda: tfdist.PipelineStrategy(microbatches=0)),
        "schedule": message(lambda: tfdist.PipelineStrategy(schedule="zigzag")),
        "eager": message(lambda: fit(None, run_eagerly=True)),
        "own step": message(own_step),
        "no model": message(no_model),
        "cuts": message(lambda: fit(None, cuts=["fist"])),
    }
