"""A worker of a training that the monitor watches; see test_slow_link.py."""

from __future__ import annotations

import keras

import tfdist
from tests.strategies.behaviours.common import batches, cross_entropy, rows

strategy = tfdist.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(256), keras.layers.Dense(512), keras.layers.Dense(3)]
    )
    model.compile("sgd", cross_entropy())
monitor = tfdist.callbacks.StragglerMonitor(every=10)
model.fit(batches(*rows(480), 24), epochs=1, verbose=0, callbacks=[monitor])
