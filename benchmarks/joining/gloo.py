"""Measures the start of Gloo's ranks. A Python interpreter with torch runs this program."""

from __future__ import annotations

import datetime
import json
import socket
import sys
import time
from collections.abc import Callable
from functools import partial

import torch.distributed as dist  # type: ignore[import-not-found]

from benchmarks.joining.forked import Row, measure


def join(rank: int, ranks: int, port: int, timeout: float) -> tuple[Row, Callable[[], None]]:
    """Connects one rank to the store of rank 0 and to all other ranks, and calls a barrier.

    Returns:
        The measurements, and a function that does nothing; see `forked.measure`.
    """
    begin = time.monotonic()
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=timeout),
    )
    dist.barrier()
    return {"mesh_s": time.monotonic() - begin}, lambda: None


def main() -> None:
    """Measures one number of ranks, and prints the result as JSON."""
    ranks, idle, timeout = int(sys.argv[1]), float(sys.argv[3]), float(sys.argv[4])
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    one_rank = partial(join, ranks=ranks, port=port, timeout=timeout)
    print("ROW " + json.dumps(measure(ranks, one_rank, idle)), flush=True)


if __name__ == "__main__":
    main()
