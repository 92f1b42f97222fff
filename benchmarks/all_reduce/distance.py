"""Measures the latency between cores, which a virtual machine's host may change at any time.

If only some cores share a cache, every backend is several times slower between distant cores than
between close cores. The latency shows whether a change of the figures has this cause.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.all_reduce.compiling import RANKS, build
from benchmarks.all_reduce.job import MissingError


def measure_distance(builds: Path) -> float | None:
    """Returns the nanoseconds that a word takes from one core to another.

    Args:
        builds: the folder for compiled programs.

    Returns:
        The nanoseconds; None without a compiler, or with one core only.
    """
    try:
        program = build("gcc", [RANKS / "distance.c"], builds / "distance")
        done = subprocess.run([program], capture_output=True, text=True, timeout=10)
    except (MissingError, subprocess.TimeoutExpired):
        return None
    return float(done.stdout) if done.stdout.strip() else None
