"""Makes a worker compute on one core, with one thread, and without a GPU."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence


def take_place(rank: int, addresses: Sequence[str]) -> None:
    """Configures this process; call it before any framework is imported.

    Args:
        rank: the rank of this worker, which is also the number of its core, modulo the number of
            cores.
        addresses: the addresses of all workers; empty if they do not communicate.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ.pop("TF_CONFIG", None)
    os.environ.update(
        CUDA_VISIBLE_DEVICES="",
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
        TF_CPP_MIN_LOG_LEVEL="2",  # So that a worker's last lines do not hide its error.
        TF_NUM_INTRAOP_THREADS="1",
        TF_NUM_INTEROP_THREADS="2",
    )
    if addresses:
        task = {"type": "worker", "index": rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
