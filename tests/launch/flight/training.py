"""A training whose worker is late in one step: `training.py KIND PLACE RANK WORKERS_OF_A_HOST`."""

from __future__ import annotations

import os
import sys
import time

import tfdist
from tests.monitoring import faults

kind, place, late, of_a_host = sys.argv[1:]
os.environ["TFDIST_HOST"] = f"host {tfdist.rank() // int(of_a_host)}"


def load_slowly():
    time.sleep(6)


model, data, callback = faults.training(
    tfdist.MultiWorkerMirroredStrategy(), kind, place, int(late), faults.Once(load_slowly), steps=12
)
model.fit(data, epochs=1, verbose=0, callbacks=[callback])
