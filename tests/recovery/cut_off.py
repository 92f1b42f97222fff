"""A worker of a training between whose hosts the network is cut: `cut_off.py FOLDER BEHAVIOR`.

After step 9, the workers wait until the file FOLDER/cut exists. See test_cut_off.py.
"""

from __future__ import annotations

import importlib
import pathlib
import pickle
import sys
import time
import traceback
from typing import Any

import keras

import tfdist


class Wait(keras.callbacks.Callback):
    """Waits for a file after a step.

    Args:
        folder: where the file will be; each worker makes one there first.
        step: how many steps have ended then.
    """

    def __init__(self, folder: pathlib.Path, step: int) -> None:
        super().__init__()
        self._folder, self._step, self._steps = folder, step, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps += 1
        if self._steps == self._step:
            (self._folder / f"{RANK}.waits").touch()
            while not (self._folder / "cut").exists():
                time.sleep(0.02)


folder = pathlib.Path(sys.argv[1])
behavior = importlib.import_module(f"tests.recovery.behaviours.{sys.argv[2]}")
make_strategy = getattr(behavior, "make", lambda _: tfdist.MultiWorkerMirroredStrategy())
strategy = make_strategy({})
RANK = tfdist.rank()
try:
    settings = {"patience": 20.0, "more": lambda: [Wait(folder, step=9)]}
    answer = True, behavior.trained(strategy, settings, {})
except Exception:
    answer = False, traceback.format_exc()
(folder / f"{RANK}.answer").write_bytes(pickle.dumps(answer))
