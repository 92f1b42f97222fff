"""The program of a worker: configures its process, imports the framework, and then trains."""

from __future__ import annotations

import importlib
from multiprocessing.connection import Connection

from benchmarks.pipeline.backends import BACKENDS
from benchmarks.step_time.place import take_place
from benchmarks.step_time.serving import serve


def work(
    pipe: Connection,
    backend: str,
    rank: int,
    addresses: list[str],
    model: str,
    pass_seconds: float | None,
) -> None:
    """Calls methods of a trainer for the driver, until the driver closes the pipe.

    A request of the driver consists of the name of a method and its arguments. The answer is the
    return value of the method.

    Args:
        pipe: the pipe to the driver.
        backend: a key of `BACKENDS`.
        rank: the rank of this worker. It also selects the worker's core.
        addresses: the addresses of all workers; empty for one process.
        model: see `Trainer`.
        pass_seconds: see `Trainer`.
    """
    take_place(rank, addresses)
    module = importlib.import_module(f"benchmarks.pipeline.{BACKENDS[backend].framework}_trainer")
    settings = {"jit": True} if BACKENDS[backend].compiled else {}
    trainer = module.Trainer(addresses, rank, model, pass_seconds, **settings)
    while True:
        method, arguments = pipe.recv()
        pipe.send(getattr(trainer, method)(*arguments))


if __name__ == "__main__":
    serve(work)
