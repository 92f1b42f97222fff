"""A worker of a training that is watched: `slow_link.py STEPS TIMELINE [FILE]`.

With a file, the training is repeated until that exists. See test_slow_link.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras

import tfdist
from tests.strategies.behaviours.common import batches, cross_entropy, rows


class Until(keras.callbacks.Callback):
    """Ends the training after the epoch in which a file comes into being."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = Path(path)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if tfdist.is_chief() and self._path.exists():
            self.model.stop_training = True


strategy = tfdist.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(256), keras.layers.Dense(512), keras.layers.Dense(3)]
    )
    model.compile("sgd", cross_entropy())
steps, timeline, *file = int(sys.argv[1]), *sys.argv[2:]
callbacks = [
    tfdist.callbacks.StragglerMonitor(every=10),
    tfdist.callbacks.Timeline(timeline, (steps // 2, steps)),
    *map(Until, file),
]
epochs = 1_000_000 if file else 1
model.fit(batches(*rows(24 * steps), 24), epochs=epochs, verbose=0, callbacks=callbacks)
