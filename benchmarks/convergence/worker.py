"""A worker's process: settings that the frameworks read when they are imported, then trainings."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from multiprocessing.connection import Connection

from benchmarks.step_time.place import take_place
from benchmarks.step_time.serving import serve


def work(pipe: Connection, rank: int, addresses: list[str]) -> None:
    """Trains as often as the driver asks, until it is gone.

    Args:
        pipe: to the driver.
        rank: of this worker, which is also the number of its core, and of its host.
        addresses: of all workers.
    """
    take_place(rank, addresses)
    os.environ["TFDIST_HOST"] = str(rank)
    from benchmarks.convergence.training import train

    while True:
        outcome = train(pipe.recv())
        weights = b"".join(w.tobytes() for w in outcome.weights)
        pipe.send(dataclasses.replace(outcome, weights=hashlib.sha256(weights).hexdigest()))


if __name__ == "__main__":
    serve(work)
