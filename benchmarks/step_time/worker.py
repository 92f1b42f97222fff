"""The program of a worker: configures its process, imports the framework, and then trains."""

from __future__ import annotations

import dataclasses
import importlib
from multiprocessing.connection import Connection

from benchmarks.step_time.backends import BACKENDS
from benchmarks.step_time.clock import Clock
from benchmarks.step_time.models import MODELS
from benchmarks.step_time.place import take_place
from benchmarks.step_time.serving import serve


def work(
    pipe: Connection, backend: str, model: str, optimizer: str, rank: int, addresses: list[str]
) -> None:
    """Trains until the driver closes the pipe.

    Args:
        pipe: the pipe to the driver.
        backend: a key of `BACKENDS`.
        model: a key of `MODELS`.
        optimizer: a key of `OPTIMIZERS`.
        rank: the rank of this worker. It also selects the worker's core.
        addresses: the addresses of all workers; empty if the workers do not communicate.
    """
    take_place(rank, addresses)
    training = importlib.import_module(
        f"benchmarks.step_time.{BACKENDS[backend].framework}_training"
    )
    workload = dataclasses.replace(MODELS[model], optimizer=optimizer)
    training.TRAINING[backend](workload, rank, addresses, Clock(pipe))


if __name__ == "__main__":
    serve(work)
