"""What each rank runs for `test_recording.py`."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers

import tfdist
from tfdist._src.comm import flight_log


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


def explained(strategy):
    """What a step communicates, before and after the first one, and what the flight log notes."""
    noted = []
    real = flight_log.note_step
    flight_log.note_step = lambda name, step: noted.append(step)
    strategy = tfdist.HybridStrategy(pipeline_size=2, microbatches=2)

    def root_mean_square(y, z):
        return keras.ops.sqrt(keras.ops.mean(keras.ops.square(y - z)))

    def build():
        inputs = keras.Input((6,), dtype="int32")
        table = layers.Embedding(9, 8)
        x = layers.GlobalAveragePooling1D()(table(inputs))
        return keras.Model(inputs, layers.Dense(4, name="head")(layers.Dense(8, name="cut")(x)))

    try:
        with strategy.scope():
            model = tfdist.PipelineModel(build, cuts=["cut"])
            model.compile("sgd", root_mean_square)
        x, y = np.ones([12, 6], "int32"), np.zeros([12, 4], "float32")
        found = strategy.explain(model, (x, y))
        model.train_on_batch(x, y)
        again = strategy.explain(model, (x, y))
        with strategy.scope():
            whole = build()
            whole.compile("sgd", "mse")
        try:
            strategy.explain(whole, (x, y))
        except tfdist.errors.UnsupportedError as error:
            refused = str(error)
    finally:
        flight_log.note_step = real
    texts = [[str(one) for one in each] for each in (found, again)]
    return texts[0], texts[1], noted, refused


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
