"""Runs the ranks as forks of one process, so that they share the memory of imported modules."""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]

SPARE = 200
"""The number of file descriptors that a process may need in addition to those for the ranks."""


def cpu_seconds() -> float:
    """Returns the CPU time that this process has used so far, in seconds."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def own_memory_kib() -> int:
    """Returns the size of the memory that this process does not share with other processes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


class Gate:
    """A barrier that the parent process opens for all ranks."""

    def __init__(self) -> None:
        self._wait, self._open = os.pipe()

    def wait(self) -> None:
        """Blocks a rank until the parent process calls `open`."""
        os.close(self._open)
        os.read(self._wait, 1)

    def open(self) -> None:
        """Lets all ranks continue. Only the parent process calls this method."""
        os.close(self._open)


def measure(ranks: int, join: Callable[[int], tuple[Row, Callable[[], None]]], idle: float) -> Row:
    """Forks the ranks, lets them join the job at the same time, and measures the cost.

    Args:
        ranks: the number of ranks.
        join: a function that takes a rank, and connects it to the other ranks. It returns a
            dictionary of measurements, and a function that shuts the rank down.
        idle: the time for which the ranks stay idle, in seconds.

    Returns:
        A dictionary with:

        - `ranks`: the number of ranks.
        - `seconds`: the time until the last rank has joined.
        - The measurements that `join` returned, each as the maximum over the ranks.
        - `cpu_s`: the CPU time that rank 0 used to join, in seconds.
        - `memory_kib`: the additional memory of rank 0 after it has joined.
        - `idle_cpu`: the share of a core that rank 0 uses while all ranks are idle.

    Raises:
        RuntimeError: a rank has failed.
    """
    gates = [Gate() for _ in range(3)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * ranks + SPARE)), hard))
    gc.collect()
    # So that a garbage collection in a rank does not write to the shared memory. A write would copy
    # the memory.
    gc.freeze()
    reports = []
    pids = []
    for rank in range(ranks):
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            for report in (read, *(other.fileno() for other in reports)):
                os.close(report)
            _rank(rank, join, idle, gates, write)
        os.close(write)
        reports.append(os.fdopen(read))
        pids.append(pid)
    try:
        begin = time.monotonic()
        gates[0].open()
        rows = [_line(report) for report in reports]
        seconds = max(row.pop("end") for row in rows) - begin
        gates[1].open()
        idles = [_line(report)["idle_cpu"] for report in reports]
        gates[2].open()
        for pid in pids:
            os.waitpid(pid, 0)
        pids.clear()
    finally:
        for pid in pids:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
    own = {key: rows[0].pop(key) for key in ("cpu_s", "memory_kib")}
    largest = {key: max(row[key] for row in rows) for key in rows[0] if key not in own}
    return {"ranks": ranks, "seconds": seconds, **largest, **own, "idle_cpu": idles[0]}


def _line(report: Any) -> Row:
    line = report.readline()
    row: Row = json.loads(line) if line else {"error": "it has ended"}
    if "error" in row:
        raise RuntimeError(f"A rank has failed: {row['error']}")
    return row


def _rank(
    rank: int,
    join: Callable[[int], tuple[Row, Callable[[], None]]],
    idle: float,
    gates: list[Gate],
    report: int,
) -> None:
    """Runs a rank in a forked process, and then ends the process."""

    def say(row: Row) -> None:
        os.write(report, json.dumps(row).encode() + b"\n")

    try:
        gates[0].wait()
        memory = own_memory_kib()
        before = cpu_seconds()
        row, end = join(rank)
        row["end"] = time.monotonic()
        row["cpu_s"] = cpu_seconds() - before
        row["memory_kib"] = own_memory_kib() - memory
        say(row)
        gates[1].wait()
        before = cpu_seconds()
        time.sleep(idle)
        say({"idle_cpu": (cpu_seconds() - before) / idle if idle else 0.0})
        gates[2].wait()
        end()
    except BaseException as error:
        say({"error": "".join(traceback.format_exception_only(error)).strip()})
        if not isinstance(error, Exception):
            traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)
