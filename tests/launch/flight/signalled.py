"""A job whose workers get SIGUSR1: `signalled.py [without a folder | the user's]`."""

from __future__ import annotations

import os
import signal
import sys

import tensorflow as tf

import tfdist

if sys.argv[1:] == ["without a folder"]:
    del os.environ["TFDIST_FLIGHT_DIR"]
if sys.argv[1:] == ["the user's"]:
    signal.signal(signal.SIGUSR1, lambda *_: print("the user's handler", flush=True))
strategy = tfdist.MultiWorkerMirroredStrategy()
os.kill(os.getpid(), signal.SIGUSR1)
total = strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.ones([])))
os.kill(os.getpid(), signal.SIGUSR1)
print("total", float(total), flush=True)
