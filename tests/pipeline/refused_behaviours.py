"""Models that train in one process but not in microbatches."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import tfdist


class _Centering(keras.layers.Layer):
    """Subtracts the mean of the batch."""

    def call(self, x):
        return x - ops.mean(x, axis=0)


class _Discrepancy(keras.layers.Layer):
    """Adds a loss that is no mean over rows."""

    def call(self, x):
        self.add_loss(ops.sum(ops.square(ops.mean(x, axis=0))))
        return x


def _stages(dtype=None, between=None):
    def build():
        x = inputs = keras.Input((16,))
        x = keras.layers.Dense(16, use_bias=False, dtype=dtype, name="hidden")(x)
        if between is not None:
            x = between(name="between")(x)
        return keras.Model(inputs, keras.layers.Dense(3)(x))

    return tfdist.PipelineModel(build, balance="parameters")


def centering(strategy):
    return _said(lambda: _stages(between=_Centering))


def a_penalty_that_couples_rows(strategy):
    return _said(lambda: _stages(between=_Discrepancy))


def statistics_of_all_replicas(strategy):
    normalization = keras.layers.BatchNormalization
    return _said(lambda: _stages(between=lambda name: normalization(synchronized=True)))


def float8(strategy):
    return _said(lambda: _stages(dtype="float8_from_float32"))


def unlike_rows(strategy):
    """Batches of a graph: its nodes, and its edges."""

    def build():
        nodes, edges = keras.Input((4,)), keras.Input((2,))
        both = keras.layers.Concatenate()([keras.layers.Dense(3)(nodes), edges])
        return keras.Model([nodes, edges], keras.layers.Dense(1)(both))

    graph = (np.zeros((10, 4), "float32"), np.zeros((26, 2), "float32"))
    data = tf.data.Dataset.from_tensors((graph, np.zeros((10, 1), "float32")))
    return _said(lambda: tfdist.PipelineModel(build, balance="parameters"), data)


def a_model_in_one_piece(strategy):
    return _said(lambda: keras.Sequential([keras.Input((16,)), keras.layers.Dense(3)]))


def _said(make, data=None):
    """What `fit` says of a model."""
    rows = np.ones((8, 16), "float32"), np.ones((8, 3), "float32")
    strategy = tfdist.HybridStrategy(pipeline_size=2, microbatches=2)
    try:
        with strategy.scope():
            model = make()
            model.compile("sgd", "mse")
        model.fit(*(rows if data is None else [data]), verbose=0)
    except Exception as error:
        return str(error)
    return "trained"


def another_model(strategy, what):
    """The error where one worker has something else; "" if there is none."""
    odd = strategy.extended.worker_rank == 1
    units = 24 if odd and what == "units" else 16

    def build():
        x = inputs = keras.Input((16,))
        x = keras.layers.Dense(units, "tanh" if odd and what == "activation" else "relu")(x)
        if odd and what == "more":
            x = keras.layers.ReLU()(x)
        x = keras.layers.Dropout(0.1 if odd and what == "rate" else 0.2)(x)
        if odd and what == "policy":
            x = keras.layers.Dense(16, dtype="mixed_bfloat16")(x)
        else:
            x = keras.layers.Dense(16)(x)
        return keras.Model(inputs, keras.layers.Dense(3)(x))

    if odd and what == "names":
        keras.layers.Dense(3)
    momentum = 0.5 if odd and what == "optimizer" else 0.9
    loss = "mae" if odd and what == "loss" else "mse"
    pipeline = tfdist.HybridStrategy(pipeline_size=2, microbatches=2)
    try:
        with pipeline.scope():
            model = tfdist.PipelineModel(build, balance="parameters")
            model.compile(keras.optimizers.SGD(0.1, momentum), loss)
    except tfdist.errors.ProgramMismatchError as error:
        return str(error)
    return ""


def assigned_by_one(strategy, what, size):
    """The error where one worker assigns between steps; "" if there is none."""

    def build():
        x = inputs = keras.Input((16,))
        for _ in range(3):
            x = keras.layers.Dense(16, "relu")(x)
        return keras.Model(inputs, keras.layers.Dense(3)(x))

    pipeline = tfdist.HybridStrategy(pipeline_size=size, microbatches=2)
    with pipeline.scope():
        model = tfdist.PipelineModel(build, balance="parameters")
        model.compile(keras.optimizers.SGD(0.1, name="sgd"), "mse")
    rows = np.ones((16, 16), "float32"), np.ones((16, 3), "float32")

    def assign(rank):
        if what == "learning rate":
            model.optimizer.learning_rate = 0.5 if rank == 1 else 0.1
        elif what == "by all":
            model.optimizer.learning_rate = 0.5
        elif what == "weight" and rank == 1:
            model.layers[0].bias.assign_add(tf.ones(16))
        elif what == "as it was" and rank == 1:
            model.layers[0].bias.assign(tf.convert_to_tensor(model.layers[0].bias))
        elif what == "behind" and rank == 1:
            copy = model.layers[0].bias.value.values[0]
            copy.assign(copy + 1.0)

    class Assigning(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1 and what != "behind":
                assign(strategy.extended.worker_rank)

    try:
        model.fit(*rows, batch_size=4, verbose=0, callbacks=[Assigning()])
        assign(strategy.extended.worker_rank)
        model.fit(*rows, batch_size=4, verbose=0)
    except tfdist.errors.ReplicaMismatchError as error:
        return str(error)
    return ""
