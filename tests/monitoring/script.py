"""A script that trains until it is told to stop: `script.py FOLDER EPOCHS`.

Each worker counts as a host of its own.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

os.environ["TFDIST_HOST"] = os.environ["TF_CONFIG"].rpartition('"index"')[2]

import keras

import tfdist
from tests.strategy.behaviours.common import batches, compile_mlp, rows

folder, epochs = Path(sys.argv[1]), int(sys.argv[2])
stop = folder / "stop"


class StopWhenTold(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if tfdist.is_chief() and stop.exists():
            self.model.stop_training = True


model = compile_mlp(tfdist.MultiWorkerMirroredStrategy())
model.fit(batches(*rows(43), 8), epochs=epochs, verbose=0, callbacks=[StopWhenTold()])
(folder / f"trained-{tfdist.rank()}").touch()
while not stop.exists():
    time.sleep(0.05)
