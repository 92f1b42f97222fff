"""Divides the codecs into groups. Only the processes of one group run at the same time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.compression.codecs import NONE

WORKER_BYTES = 1 << 30


def make_groups(codecs: Sequence[str], together: int) -> list[list[str]]:
    """Divides codecs into groups.

    If `none` is one of the codecs, it is the first codec of every group, so that every codec can be
    compared with `none` in the same rounds.

    Args:
        codecs: the names of the codecs, without duplicates.
        together: the maximum number of codecs in a group, at least 2.
    """
    first = [NONE] if NONE in codecs else []
    others = [codec for codec in codecs if codec not in first]
    room = together - len(first)
    return [first + others[i : i + room] for i in range(0, max(1, len(others)), room)]


def fitting(hosts: int) -> int:
    """Returns how many codecs can run at the same time in the available memory, at least 2.

    Args:
        hosts: the number of hosts, which is the number of processes of each codec.
    """
    return max(2, free_memory() // (hosts * WORKER_BYTES))


def free_memory() -> int:
    """Returns the number of bytes of memory that are available without swapping."""
    match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    assert match
    return int(match[1]) << 10
