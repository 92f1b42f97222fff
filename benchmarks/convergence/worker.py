"""A worker's process: sets the variables that the frameworks read at import, and then trains."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from multiprocessing.connection import Connection

from benchmarks.step_time.place import take_place
from benchmarks.step_time.serving import serve


def work(pipe: Connection, rank: int, addresses: list[str]) -> None:
    """Runs the trainings that the driver requests, until the driver is gone.

    Args:
        pipe: the pipe to the driver.
        rank: the rank of this worker, which is also the number of its core and of its host.
        addresses: the addresses of all workers.
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
