"""The start of Gloo's ranks by torch.distributed; run in a Python with torch."""

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
    """Starts one rank: connects to rank 0's store and to all ranks, and calls a barrier."""
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
    """Prints the figures for one number of ranks."""
    ranks, idle, timeout = int(sys.argv[1]), float(sys.argv[3]), float(sys.argv[4])
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    one_rank = partial(join, ranks=ranks, port=port, timeout=timeout)
    print("ROW " + json.dumps(measure(ranks, one_rank, idle)), flush=True)


if __name__ == "__main__":
    main()
