"""The program of a worker: configures its process, imports the framework, and then trains."""

from __future__ import annotations

from multiprocessing.connection import Connection

from benchmarks.compression.tasks import TASKS
from benchmarks.step_time.place import take_place
from benchmarks.step_time.serving import serve


def work(pipe: Connection, codec: str, model: str, rank: int, addresses: list[str]) -> None:
    """Trains until the driver closes the pipe.

    Args:
        pipe: the pipe to the driver.
        codec: a name in `codecs.KNOWN`.
        model: a key of `TASKS`.
        rank: the rank of this worker. It also selects the worker's core.
        addresses: the addresses of all workers.
    """
    take_place(rank, addresses)
    from benchmarks.compression.training import train

    train(TASKS[model], codec, len(addresses), pipe)


if __name__ == "__main__":
    serve(work)
