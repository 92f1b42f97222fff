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


def _in_graph(is_due, name, value):
    """Returns the value, after a strike if the function `is_due` returns true."""

    def strike():
        if is_due():
            _strike(name)
        return np.int32(0)

    # Without operands, as the other workers' programs do not have it.
    with tf.control_dependencies([value]):
        struck = tf.numpy_function(strike, [], tf.int32)
    with tf.control_dependencies([struck]):
        return tf.identity(value)


class Mortal(keras.layers.Layer):
    """Strikes in its third forward or backward pass, or in its first of an evaluation."""

    def __init__(self, phase, name, victim):
        super().__init__()
        self.phase, self.signal, self.victim = phase, name, victim
        self.passes = itertools.count(1)

    def get_config(self):
        return {"name": self.name}  # Workers compare the configurations of layers.

    def _is_third(self):
        return next(self.passes) == 3

    def call(self, x, training=None):
        if self.victim and self.phase == "evaluation" and not training:
            return _in_graph(lambda: True, self.signal, x)
        if not training or not self.victim or self.phase not in ("forward", "backward"):
            return x
        if self.phase == "forward":
            return _in_graph(self._is_third, self.signal, x)

        @tf.custom_gradient
        def through(x):
            return tf.identity(x), lambda dy: _in_graph(self._is_third, self.signal, dy)

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
        add_up, steps = PipelineStep.sum_gradients_of_part, itertools.count(1)

        def strike_first(self, by, gradients, variables):
            first, *others = gradients
            struck = _in_graph(lambda: next(steps) == 3, name, first)
            return add_up(self, by, [struck, *others], variables)

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
