"""Decides which workers are on the same host, where they can share memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Hashable, Sequence

from tfdist._src.options import Options

MEMORY = "/dev/shm"
"""The folder of shared memory files."""

_BOOT = "/proc/sys/kernel/random/boot_id"
_NETWORK = "/proc/self/ns/net"


def host_key(options: Options) -> str:
    """A key that two processes share exactly if they are on the same host.

    Containers on one machine count as one host only if they share the network and /dev/shm.

    Args:
        options: `host` overrides automatic detection.

    Returns:
        An opaque string, only to be compared for equality.

    Example:
        >>> host_key(Options(host="a"))
        'TFDIST_HOST a'
    """
    if options.host:
        return f"TFDIST_HOST {options.host}"
    return f"boot {_boot()} network {_network()} memory {_memory()}"


def numbered(keys: Sequence[Hashable]) -> tuple[int, ...]:
    """Numbers hosts in order of first appearance.

    Example:
        >>> numbered(["a", "b", "a", "c"])
        (0, 1, 0, 2)
    """
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(key, len(numbers)) for key in keys)


def _boot() -> str:
    """Identifies a machine, until it is restarted."""
    try:
        with open(_BOOT) as file:
            return file.read().strip()
    except (OSError, ValueError):
        return socket.gethostname()


def _network() -> str:
    try:
        return str(os.stat(_NETWORK).st_ino)
    except OSError:
        return socket.gethostname()


def _memory() -> str:
    try:
        return str(os.stat(MEMORY).st_dev)
    except OSError:  # nothing can be shared; creating the segment will report it
        return "none"
