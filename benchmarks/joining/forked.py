"""Runs ranks as forks of one process, so that they share the memory of its imports."""

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
"""Descriptors for everything but the ranks."""


def cpu_seconds() -> float:
    """CPU seconds used by this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def own_memory_kib() -> int:
    """The memory that this process shares with no other."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


class Gate:
    """Blocks the ranks until the parent lets all of them proceed."""

    def __init__(self) -> None:
        self._wait, self._open = os.pipe()

    def wait(self) -> None:
        """Blocks a rank until `open`."""
        os.close(self._open)
        os.read(self._wait, 1)

    def open(self) -> None:
        """Lets all ranks proceed."""
        os.close(self._open)


def measure(ranks: int, join: Callable[[int], tuple[Row, Callable[[], None]]], idle: float) -> Row:
    """Forks the ranks, lets them join at the same moment, and measures it.

    Args:
        ranks: the number of ranks.
        join: starts a rank; returns its measurements, and a function that shuts it down.
        idle: seconds for which the ranks stay idle.

    Returns:
        `seconds` until the last rank has joined; the maximum over the ranks of each measurement;
        and of rank 0 `cpu_s`, `memory_kib` (additional, once it has joined), and `idle_cpu`.

    Raises:
        RuntimeError: a rank has failed.
    """
    gates = [Gate() for _ in range(3)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * ranks + SPARE)), hard))
    gc.collect()
    gc.freeze()  # Otherwise a garbage collection would copy the shared memory.
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
    """Runs a rank; does not return."""

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
