"""The program of a worker: configures its process, imports the framework, and then trains."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.step_time.models import MODELS
from benchmarks.step_time.place import take_place
from benchmarks.step_time.serving import serve


def work(
    pipe: Connection, model: str, rank: int, addresses: list[str], metrics_port: int, folder: str
) -> None:
    """Trains until the driver closes the pipe.

    Args:
        pipe: the pipe to the driver.
        model: a key of `MODELS`.
        rank: the rank of this worker. It also selects the worker's core.
        addresses: the addresses of all workers; empty for a single worker.
        metrics_port: the port at which the first worker serves metrics; 0 for no metrics. Worker i
            uses the port `metrics_port + i`.
        folder: the folder for the files of the callbacks.
    """
    take_place(rank, addresses)
    if metrics_port:
        os.environ["TFDIST_METRICS_PORT"] = str(metrics_port)
    import tfdist
    from benchmarks.observing.rounds import Rounds
    from benchmarks.step_time.keras_training import fit_with

    workload = MODELS[model]
    strategy = tfdist.MultiWorkerMirroredStrategy()
    fit_with(workload, workload.rows * max(1, len(addresses)), strategy, Rounds(pipe, Path(folder)))


if __name__ == "__main__":
    serve(work)
