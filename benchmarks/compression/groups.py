"""Which codecs' processes are alive at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.compression.codecs import NONE

WORKER_BYTES = 1 << 30


def make_groups(codecs: Sequence[str], together: int) -> list[list[str]]:
    """Splits codecs in groups; `none`, where it is among them, is the first of each.

    Args:
        codecs: names, each once.
        together: codecs in a group at most, 2 or more.
    """
    first = [NONE] if NONE in codecs else []
    others = [codec for codec in codecs if codec not in first]
    room = together - len(first)
    return [first + others[i : i + room] for i in range(0, max(1, len(others)), room)]


def fitting(hosts: int) -> int:
    """How many codecs the memory that is free takes, at least 2.

    Args:
        hosts: workers of each codec.
    """
    return max(2, free_memory() // (hosts * WORKER_BYTES))


def free_memory() -> int:
    """Bytes that can be had without swapping."""
    match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    assert match
    return int(match[1]) << 10
