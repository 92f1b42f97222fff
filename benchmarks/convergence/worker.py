"""The program of a worker: configures its process, imports the framework, and then trains."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from multiprocessing.connection import Connection

from benchmarks.step_time.place import take_place
from benchmarks.step_time.serving import serve


def work(pipe: Connection, rank: int, addresses: list[str]) -> None:
    """Runs the training runs that the driver requests, until the driver closes the pipe.

    Args:
        pipe: the pipe to the driver.
        rank: the rank of this worker. It is also the name of its host, and selects its core.
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
