"""Configures a worker to use one core, one compute thread, and no GPU."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence


def take_place(rank: int, addresses: Sequence[str]) -> None:
    """Configures this process. Must be called before any framework is imported.

    Args:
        rank: the rank of this worker. Worker i runs on core i; if there are more workers than
            cores, several workers share a core.
        addresses: the addresses of all workers; empty if the workers do not communicate.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ.pop("TF_CONFIG", None)
    os.environ.update(
        CUDA_VISIBLE_DEVICES="",
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
        TF_CPP_MIN_LOG_LEVEL="2",  # So that the last lines of a worker's output show its error.
        TF_NUM_INTRAOP_THREADS="1",
        TF_NUM_INTEROP_THREADS="2",
    )
    if addresses:
        task = {"type": "worker", "index": rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
