"""Pipelines in which an operation of one worker fails while others wait, or it waits itself."""

from __future__ import annotations

import keras

import tfdist
from tests.pipeline.faults import model
from tests.strategy.behaviours.failing_steps import Wears, data, said


def fit(strategy, pipeline, **arguments):
    """The last worker holds a layer that raises in NumPy in its third step, between others."""
    keras.utils.set_random_seed(0)
    strategy = tfdist.HybridStrategy(pipeline_size=pipeline, microbatches=4)
    with strategy.scope():
        topology = strategy.extended.group.topology
        fails = topology.rank == topology.size - 1
        build = model(Wears(fails, count=10), keras.layers.Dense(8, name="third"))
        pipelined = tfdist.PipelineModel(build, cuts=["first"])
        pipelined.compile("sgd", "mse", **arguments)
    x, y = data(64)
    return said(lambda: pipelined.fit(x, y, batch_size=16, verbose=0))
