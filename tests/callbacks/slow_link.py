"""A worker of a training that is watched: `slow_link.py STEPS TIMELINE`; see test_slow_link.py."""

from __future__ import annotations

import sys

import keras

import tfdist
from tests.strategies.behaviours.common import batches, cross_entropy, rows

strategy = tfdist.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(256), keras.layers.Dense(512), keras.layers.Dense(3)]
    )
    model.compile("sgd", cross_entropy())
steps, timeline = int(sys.argv[1]), sys.argv[2]
callbacks = [
    tfdist.callbacks.StragglerMonitor(every=10),
    tfdist.callbacks.Timeline(timeline, (steps // 2, steps)),
]
model.fit(batches(*rows(24 * steps), 24), epochs=1, verbose=0, callbacks=callbacks)
