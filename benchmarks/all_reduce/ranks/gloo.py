"""Runs a rank of the backend `gloo`: reduces in place with `torch.distributed.all_reduce`."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from benchmarks.all_reduce.ranks import rank


def main() -> None:
    """Joins the process group, and executes the driver's commands."""
    arguments = rank.read_arguments()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{arguments.addresses[0]}",
        rank=arguments.rank,
        world_size=arguments.size,
    )
    data = torch.zeros(0)
    pattern = torch.zeros(0)
    first = torch.zeros(1)

    def check(size: int) -> int:
        nonlocal data, pattern
        count = size // 4
        if data.numel() != count:
            data = torch.zeros(count)
            period = torch.arange(1, rank.PERIOD + 1, dtype=torch.float32)
            pattern = period.repeat(count // rank.PERIOD + 1)[:count]
        torch.mul(pattern, arguments.rank + 1, out=data)
        dist.all_reduce(data)
        wrong = int(torch.count_nonzero(data != pattern * arguments.factor))
        data.zero_()
        return wrong

    def measure(repetitions: int) -> float:
        dist.all_reduce(first)  # A barrier, so that all ranks begin at the same time.
        start = time.perf_counter()
        for _ in range(repetitions):
            dist.all_reduce(data)
        return time.perf_counter() - start

    rank.serve(arguments, check, measure)


if __name__ == "__main__":
    main()
