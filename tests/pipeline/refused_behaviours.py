"""Models that train in one process but not in microbatches."""

from __future__ import annotations

import keras
import numpy as np

import tfdist


def coupling_loss(strategy):
    return _said(keras.losses.Dice())


def float8(strategy):
    return _said("mse", dtype="float8_from_float32")


def _said(loss, dtype=None):
    """What `fit` says of the model."""

    def build():
        inputs = keras.Input((16,))
        hidden = keras.layers.Dense(16, use_bias=False, dtype=dtype)(inputs)
        return keras.Model(inputs, keras.layers.Dense(3, activation="sigmoid")(hidden))

    strategy = tfdist.HybridStrategy(pipeline_size=2, microbatches=2)
    try:
        with strategy.scope():
            model = tfdist.PipelineModel(build, balance="parameters")
            model.compile("sgd", loss)
        model.fit(np.ones((8, 16), "float32"), np.ones((8, 3), "float32"), verbose=0)
    except Exception as error:
        return str(error)
    return "trained"
