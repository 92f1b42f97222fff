"""Measures the latency between two cores.

On two cores without a common cache, a backend may be several times slower than on two cores that
share a cache. The host of a virtual machine may move the virtual cores at any time. If the figures
change from one measurement to the next, the latency shows whether this is the cause.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.all_reduce.compiling import RANKS, build
from benchmarks.all_reduce.job import MissingError


def measure_distance(builds: Path) -> float | None:
    """Returns the time in which a write by one core becomes visible to another core.

    Args:
        builds: the folder for compiled programs.

    Returns:
        The time in nanoseconds. None if there is no compiler, if this process may use only one
        core, or if the measurement takes too long.
    """
    try:
        program = build("gcc", [RANKS / "distance.c"], builds / "distance")
        done = subprocess.run([program], capture_output=True, text=True, timeout=10)
    except (MissingError, subprocess.TimeoutExpired):
        return None
    return float(done.stdout) if done.stdout.strip() else None
