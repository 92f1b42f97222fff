"""Divides codecs into groups with processes that are alive at the same time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.compression.codecs import NONE

WORKER_BYTES = 1 << 30


def make_groups(codecs: Sequence[str], together: int) -> list[list[str]]:
    """Divides codecs into groups; `none`, if given, is the first codec of each group.

    Args:
        codecs: distinct names.
        together: the maximum number of codecs in a group, at least 2.
    """
    first = [NONE] if NONE in codecs else []
    others = [codec for codec in codecs if codec not in first]
    room = together - len(first)
    return [first + others[i : i + room] for i in range(0, max(1, len(others)), room)]


def fitting(hosts: int) -> int:
    """Returns the number of codecs that fit into the available memory, at least 2.

    Args:
        hosts: the number of workers of each codec.
    """
    return max(2, free_memory() // (hosts * WORKER_BYTES))


def free_memory() -> int:
    """Returns the bytes of memory that are available without swapping."""
    match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    assert match
    return int(match[1]) << 10
