"""A training in one step of which something happens to a worker.

`training.py KIND PLACE RANK WORKERS_OF_A_HOST FAULT`
"""

from __future__ import annotations

import os
import signal
import sys
import time

import tfdist
from tests.monitoring import faults

kind, place, late, of_a_host, fault = sys.argv[1:]
os.environ["TFDIST_HOST"] = f"host {tfdist.rank() // int(of_a_host)}"


def load_slowly():
    time.sleep(6)


FAULTS = {
    "is late": load_slowly,
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "is stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}
once = faults.Once(FAULTS[fault])
model, data, callback = faults.training(
    tfdist.MultiWorkerMirroredStrategy(), kind, place, int(late), once, steps=12
)
model.fit(data, epochs=1, verbose=0, callbacks=[callback])
