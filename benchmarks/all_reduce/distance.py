"""How far apart the cores are, which a virtual machine's host may change at any moment.

Where caches are shared by some cores only, the figures of every backend differ by a factor of
several between near and far; a note of it tells such a change from a change of the program.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.all_reduce.compiling import RANKS, build
from benchmarks.all_reduce.job import MissingError


def measure_distance(builds: Path) -> float | None:
    """The nanoseconds that a word takes from one core to another.

    Args:
        builds: the folder for programs that are compiled.

    Returns:
        None where there is no compiler, or one core.
    """
    try:
        program = build("gcc", [RANKS / "distance.c"], builds / "distance")
        done = subprocess.run([program], capture_output=True, text=True, timeout=10)
    except (MissingError, subprocess.TimeoutExpired):
        return None
    return float(done.stdout) if done.stdout.strip() else None
