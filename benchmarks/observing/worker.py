"""A worker's process: settings that are read when tfdist is imported, then steps."""

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
    """Trains until the driver is gone.

    Args:
        pipe: to the driver.
        model: a key of `MODELS`.
        rank: of this worker, which is also the number of its core.
        addresses: of all workers; empty for a single one.
        metrics_port: of the first worker; 0 for no metrics.
        folder: for files that are written.
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
