"""Which workers are on one host: those that can share memory and reach one another within it."""

from __future__ import annotations

import os
import socket
from collections.abc import Hashable, Sequence

from tfdist.options import Options

MEMORY = "/dev/shm"
"""Where files are memory that processes share."""

_BOOT = "/proc/sys/kernel/random/boot_id"
_NETWORK = "/proc/self/ns/net"


def host_key(options: Options) -> str:
    """Names this process's host, so that two processes with the same name share it.

    Containers on one machine count as one host only where they share the network and /dev/shm.

    Args:
        options: `host` takes the place of what the system tells.

    Returns:
        Any text; only whether two are equal means something.

    Example:
        >>> host_key(Options(host="a"))
        'TFDIST_HOST a'
    """
    if options.host:
        return f"TFDIST_HOST {options.host}"
    return f"boot {_boot()} network {_network()} memory {_memory()}"


def numbered(keys: Sequence[Hashable]) -> tuple[int, ...]:
    """Numbers hosts in the order in which they first come.

    Example:
        >>> numbered(["a", "b", "a", "c"])
        (0, 1, 0, 2)
    """
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(key, len(numbers)) for key in keys)


def _boot() -> str:
    """Differs between machines, and between a machine and itself before a restart."""
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
    except OSError:  # nothing can be shared there, which the segment's maker will say
        return "none"
