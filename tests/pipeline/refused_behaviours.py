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
