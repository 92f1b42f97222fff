"""A job whose worker 1 does something wrong: `script.py FAULT`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import tensorflow as tf

import tfdist

fault, rank = sys.argv[1], tfdist.rank()
if "HOSTS_OF" in os.environ:
    os.environ["TFDIST_HOST"] = f"host {rank // int(os.environ['HOSTS_OF'])}"
strategy = tfdist.MultiWorkerMirroredStrategy()
if fault == "sleeps in a part":
    tfdist.collective.communicator().split("part", [0, 1] if rank < 2 else [])
for step in range(5):
    tfdist.collective.all_reduce(tf.ones([10 + step]), name=f"step {step}")


def load_slowly():
    time.sleep(6)


if rank == 1:
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "another collective":
        tfdist.collective.broadcast(tf.ones([3]), name="weights")
    elif fault in ("sleeps", "sleeps in a part", "is late to an exchange"):
        load_slowly()
    elif fault == "raises":
        raise ValueError("bad data")
elif fault == "sleeps in a part" and rank > 1:
    load_slowly()  # and waits for nobody
elif fault == "signal":
    os.kill(os.getpid(), signal.SIGUSR1)
    log = Path(os.environ["TFDIST_FLIGHT_DIR"], f"flight-rank{rank}.json")
    while not log.exists() or not json.loads(log.read_text())["stacks"]:
        time.sleep(0.02)
if fault == "is late to an exchange" or (fault == "misses an exchange" and rank != 1):
    strategy.extended.group.exchange("options", "")
if fault == "sleeps in a part" and rank < 2:
    tfdist.collective.all_reduce(tf.ones([7]), name="in a part", communicator="part")
tfdist.collective.all_reduce(tf.ones([7]), name="the last")
