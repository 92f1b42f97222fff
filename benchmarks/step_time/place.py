"""Where a worker computes: on one core, with one thread, and without a GPU."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence


def take_place(rank: int, addresses: Sequence[str]) -> None:
    """Settles this process, before any framework is imported.

    Args:
        rank: of this worker, which is also the number of its core; where there are fewer cores,
            they are counted through again.
        addresses: of all workers; empty where they do not talk.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ.pop("TF_CONFIG", None)
    os.environ.update(
        CUDA_VISIBLE_DEVICES="",
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
        TF_CPP_MIN_LOG_LEVEL="2",  # So that what a worker says last is no information.
        TF_NUM_INTRAOP_THREADS="1",
        TF_NUM_INTEROP_THREADS="2",
    )
    if addresses:
        task = {"type": "worker", "index": rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
