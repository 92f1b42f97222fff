"""A worker of two pipelines that is killed or stopped in each phase of a training."""

from __future__ import annotations

import itertools
import os
import signal
import time

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist._src.pipeline.runtime.step_context import PipelineStep
from tfdist._src.pipeline.state.full_model import StateEntry

# In saving, of the chief's pipeline.
VICTIMS = {"saving": 2}
VICTIM = 3


def _strike(name):
    os.kill(os.getpid(), getattr(signal, name))
    time.sleep(0.1)


def _in_graph(when, name, value):
    """The value, after a strike if `when` is true."""

    def strike(now):
        if now:
            _strike(name)
        return now

    struck = tf.py_function(strike, [when], tf.bool)
    struck.set_shape([])
    return value + 0 * tf.cast(struck, value.dtype)


class Mortal(keras.layers.Layer):
    """Strikes in its third forward or backward pass, or in its first of an evaluation."""

    def __init__(self, phase, name, victim):
        super().__init__()
        self.phase, self.signal, self.victim = phase, name, victim
        self.passes = itertools.count(1)

    def _is_third(self):
        return next(self.passes) == 3

    def call(self, x, training=None):
        if self.victim and self.phase == "evaluation" and not training:
            return _in_graph(tf.constant(True), self.signal, x)
        if not training or not self.victim or self.phase not in ("forward", "backward"):
            return x
        now = tf.py_function(self._is_third, [], tf.bool)
        if self.phase == "forward":
            return _in_graph(now, self.signal, x)

        @tf.custom_gradient
        def through(x):
            return tf.identity(x), lambda dy: _in_graph(now, self.signal, dy)

        return through(x)


def train(strategy, phase, name, folder):
    """Trains, evaluates and saves; what this rank is told."""
    victim = strategy.extended.worker_rank == VICTIMS.get(phase, VICTIM)
    strategy = tfdist.HybridStrategy(pipeline_size=2, microbatches=2)

    def build():
        keras.utils.set_random_seed(0)
        dense = keras.layers.Dense
        mortal = Mortal(phase, name, victim)
        return keras.Sequential([keras.Input((4,)), dense(8, name="first"), mortal, dense(1)])

    with strategy.scope():
        model = tfdist.PipelineModel(build, cuts=["first"])
        model.compile("sgd", "mse")
    if victim and phase == "reduction":
        add_up = PipelineStep.sum_gradients_of_part

        def strike_first(self, by, gradients, variables):
            late = model.optimizer.iterations == 2
            first, *others = gradients
            return add_up(self, by, [_in_graph(late, name, first), *others], variables)

        PipelineStep.sum_gradients_of_part = strike_first
    if phase == "saving":
        collect = StateEntry.collect

        def strike_in_the_end(self, strategy, to):
            if victim:
                _strike(name)
            return collect(self, strategy, to)

        StateEntry.collect = strike_in_the_end
    x = np.ones((24, 4), "float32")
    try:
        model.fit(x, x[:, :1], batch_size=8, verbose=0)
        if phase == "evaluation":
            model.evaluate(x, x[:, :1], batch_size=8, verbose=0)
        model.save(os.path.join(folder, "model.keras"))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
