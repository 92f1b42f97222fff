"""What each rank runs for `test_recording.py`."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers

import tfdist


def record(strategy, schedule, frozen=0):
    """A step's timeline, which is one of training; so many of the first layers are not trained."""
    keras.utils.set_random_seed(0)
    strategy = tfdist.HybridStrategy(pipeline_size=2, microbatches=4, schedule=schedule)
    with strategy.scope():
        model = tfdist.PipelineModel(lambda: _build(frozen), balance="parameters")
        model.compile("sgd", "mse")
    x, y = np.ones([8, 3], "float32"), np.zeros([8, 1], "float32")
    before = model.train_on_batch(x, y)
    timeline = model.timeline_on_batch(x, y)
    return {
        "spans": [[(str(s.action), s.start, s.end) for s in own] for own in timeline.spans],
        "ranks": timeline.schedule.ranks,
        "forward": timeline.costs().forward,
        "losses": (before, model.train_on_batch(x, y)),
        "iterations": int(model.optimizer.iterations),
        "learning_rate": float(model.optimizer.learning_rate),
    }


def record_uncompiled(strategy):
    """A model that cannot train."""
    strategy = tfdist.HybridStrategy(pipeline_size=2, microbatches=4)
    with strategy.scope():
        model = tfdist.PipelineModel(_build, balance="parameters")
    try:
        model.timeline_on_batch(np.ones([8, 3]), np.zeros([8, 1]))
    except ValueError as error:
        return str(error)
    return None


def _build(frozen=0):
    dense = [layers.Dense(4, activation="tanh", trainable=i >= frozen) for i in range(5)]
    return keras.Sequential([keras.Input([3]), *dense, layers.Dense(1)])
