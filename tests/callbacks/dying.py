"""A training script that gets a signal in its first run: `dying.py FOLDER HOW RANK BATCHES`."""

from __future__ import annotations

import os
import pathlib
import signal
import sys

import keras
import numpy as np

import tfdist
from tests.callbacks.data_kinds import arrays
from tests.callbacks.resuming import EPOCHS, dense, digest
from tests.strategy.behaviours.common import rows

HOW = {"killed": signal.SIGKILL, "told to go": signal.SIGTERM}


class Signal(keras.callbacks.Callback):
    """Sends this process a signal after some batches, in its first run."""

    def __init__(self, number, folder, after):
        super().__init__()
        self._number, self._mark = number, folder / "signalled"
        self._after, self._batches = after, 0

    def on_train_batch_end(self, batch, logs=None):
        self._batches += 1
        if self._batches == self._after and not self._mark.exists():
            self._mark.write_text("")
            os.kill(os.getpid(), self._number)


def main(folder, how, rank, after):
    folder = pathlib.Path(folder)
    strategy = tfdist.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(1)
    model = dense(strategy)
    callbacks = [tfdist.callbacks.BackupAndRestore(folder / "snapshots", save_every=4)]
    if how in HOW and tfdist.rank() == int(rank):
        callbacks.append(Signal(HOW[how], folder, int(after)))
    history = model.fit(**arrays(*rows(46, 6)), epochs=EPOCHS, callbacks=callbacks, verbose=0)
    np.save(folder / f"losses-{tfdist.rank()}.npy", history.history["loss"])
    (folder / f"weights-{tfdist.rank()}").write_text(digest(model.variables))


if __name__ == "__main__":
    main(*sys.argv[1:])
