"""A worker's process: settings that the frameworks read when they are imported, then steps.

It is started by `team` with one argument, the order as JSON: what `Team` says and the number of
the file that leads to the driver.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from multiprocessing.connection import Connection

from stepping.backends import BACKENDS
from stepping.clock import Clock
from stepping.models import MODELS
from stepping.place import take_place


def work(pipe: Connection, backend: str, model: str, rank: int, addresses: list[str]) -> None:
    """Trains until the driver is gone.

    Args:
        pipe: to the driver.
        backend: a key of `BACKENDS`.
        model: a key of `MODELS`.
        rank: of this worker, which is also the number of its core.
        addresses: of all workers; empty where they do not talk.
    """
    take_place(rank, addresses)
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
