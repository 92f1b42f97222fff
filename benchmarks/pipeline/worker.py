"""A worker's process: sets the variables that the frameworks read at import, then runs orders."""

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
    """Runs orders until the driver is gone.

    Args:
        pipe: the pipe to the driver, which sends the name and arguments of a trainer's method.
        backend: a key of `BACKENDS`.
        rank: the rank of this worker, which is also the number of its core.
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
