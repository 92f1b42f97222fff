"""A worker's process: settings that the frameworks read when they are imported, then steps.

It is started by `team` with one argument, the order as JSON: what `Team` says and the number of
the file that leads to the driver.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from multiprocessing.connection import Connection

from stepping.backends import BACKENDS
from stepping.clock import Clock
from stepping.models import MODELS


def work(pipe: Connection, backend: str, model: str, rank: int, addresses: list[str]) -> None:
    """Trains until the driver is gone.

    Args:
        pipe: to the driver.
        backend: a key of `BACKENDS`.
        model: a key of `MODELS`.
        rank: of this worker, which is also the number of its core.
        addresses: of all workers; empty where they do not talk.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ.pop("TF_CONFIG", None)
    os.environ.update(
        CUDA_VISIBLE_DEVICES="",
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
        TF_NUM_INTRAOP_THREADS="1",
        TF_NUM_INTEROP_THREADS="2",
    )
    if addresses:
        task = {"type": "worker", "index": rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    try:
        training = importlib.import_module(f"stepping.{BACKENDS[backend].framework}_training")
        training.TRAINING[backend](MODELS[model], rank, addresses, Clock(pipe))
    except EOFError:
        pass  # The driver is gone.
    except Exception:
        pipe.send(traceback.format_exc().strip().splitlines()[-1])


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    work(Connection(order.pop("file")), **order)
