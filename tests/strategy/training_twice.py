"""What each rank runs where a model that is gone may leave nothing behind."""

from __future__ import annotations

import gc
import threading

import keras
import numpy as np
from keras import layers
from tensorflow.python.framework.func_graph import FuncGraph

import tfdist


def graphs_left(strategy, staged):
    """How many graphs are there after the second model in turn, more than after the first."""
    if staged:
        strategy = tfdist.HybridStrategy(pipeline_size=2, microbatches=2, schedule="1f1b")
    counts = []
    for _ in range(2):
        _train(strategy, staged)
        keras.backend.clear_session()
        gc.collect()
        for thread in threading.enumerate():
            if thread.name == "tfdist-iterators":
                thread.join()  # It ends what the model's data had.
        gc.collect()
        counts.append(sum(isinstance(thing, FuncGraph) for thing in gc.get_objects()))
    return counts[1] - counts[0]


def _train(strategy, staged):
    with strategy.scope():
        model = tfdist.PipelineModel(_build, balance="parameters") if staged else _build()
        model.compile(keras.optimizers.Adam(global_clipnorm=1.0), "mse", metrics=["mae"])
    x = np.ones([8, 4], "float32")
    model.fit(x, x[:, :2], batch_size=4, verbose=0)
    model.evaluate(x, x[:, :2], batch_size=4, verbose=0)
    model.predict(x, verbose=0)


def _build():
    return keras.Sequential(
        [keras.Input([4]), layers.Dense(3), layers.BatchNormalization(), layers.Dense(2)]
    )


def compressors_left(strategy):
    """How many compressors the group keeps after several strategies in turn."""
    for _ in range(4):
        _train(tfdist.MultiWorkerMirroredStrategy(compression="fp16"), staged=False)
        keras.backend.clear_session()
        for thread in threading.enumerate():
            if thread.name == "tfdist-iterators":
                thread.join()
        gc.collect()
    references = strategy.extended.group._compressors
    return sum(reference() is not None for reference in references)
