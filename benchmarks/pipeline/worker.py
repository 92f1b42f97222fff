"""A worker's process: settings that the frameworks read when they are imported, then orders."""

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
    """Does what it is asked until the driver is gone.

    Args:
        pipe: to the driver, which asks for a method of the trainer and gives its arguments.
        backend: a key of `BACKENDS`.
        rank: of this worker, which is also the number of its core.
        addresses: of all workers; empty for one process.
        model: as of `Trainer`.
        pass_seconds: as of `Trainer`.
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
