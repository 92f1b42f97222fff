"""A worker's process: settings that the frameworks read when they are imported, then trainings.

It is started by `team` with one argument, the order as JSON: its rank, all workers' addresses, and
the number of the file that leads to the driver.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import textwrap
import traceback
from multiprocessing.connection import Connection

from stepping.place import take_place

LONGEST = 500


def work(pipe: Connection, rank: int, addresses: list[str]) -> None:
    """Trains as often as the driver asks, until it is gone.

    Args:
        pipe: to the driver.
        rank: of this worker, which is also the number of its core, and of its host.
        addresses: of all workers.
    """
    take_place(rank, addresses)
    os.environ["TFDIST_HOST"] = str(rank)
    try:
        from converging.training import train

        while True:
            outcome = train(pipe.recv())
            weights = b"".join(w.tobytes() for w in outcome.weights)
            pipe.send(dataclasses.replace(outcome, weights=hashlib.sha256(weights).hexdigest()))
    except EOFError:
        pass  # The driver is gone.
    except Exception as error:
        traceback.print_exc()
        pipe.send(textwrap.shorten(f"{type(error).__name__}: {error}", LONGEST))


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    work(Connection(order.pop("file")), **order)
