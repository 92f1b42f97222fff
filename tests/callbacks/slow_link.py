"""A worker of a training that is watched: `slow_link.py KIND STEPS TIMELINE [FILE]`.

The kind is "fit", "int8" or "1f1b"; the timeline "none" stands for none. With a file, the training
is repeated until that exists. See test_slow_link.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras

import tfdist
from tests.strategy.behaviours.common import batches, cross_entropy, rows


class Until(keras.callbacks.Callback):
    """Ends the training after the epoch in which a file comes into being."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = Path(path)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if tfdist.is_chief() and self._path.exists():
            self.model.stop_training = True


def make(kind: str) -> keras.Model:
    """A model whose gradients, or activations between two stages, take a slow link a while."""
    wide = keras.layers.Dense(512, name="wide")
    layers = [keras.Input((8,)), keras.layers.Dense(256), wide]
    if kind == "1f1b":
        with tfdist.PipelineStrategy(microbatches=2, schedule=kind).scope():
            whole = keras.Sequential([*layers, keras.layers.Dense(3)])
            model = tfdist.PipelineModel(whole, cuts=["wide"])
            model.compile("sgd", cross_entropy())
            return model
    policy = tfdist.compression.Policy(tfdist.compression.Int8(), smallest=1)
    compression = policy if kind == "int8" else None
    with tfdist.MultiWorkerMirroredStrategy(compression=compression).scope():
        model = keras.Sequential([*layers, keras.layers.Dense(3)])
        model.compile("sgd", cross_entropy())
    return model


model = make(sys.argv[1])
steps, timeline, *file = int(sys.argv[2]), *sys.argv[3:]
callbacks = [
    tfdist.callbacks.StragglerMonitor(every=10),
    *([] if timeline == "none" else [tfdist.callbacks.Timeline(timeline, (steps // 2, steps))]),
    *map(Until, file),
]
epochs = 1_000_000 if file else 1
# Activations are as large as the gradients of the others.
size = 240 if sys.argv[1] == "1f1b" else 24
model.fit(batches(*rows(size * steps), size), epochs=epochs, verbose=0, callbacks=callbacks)
