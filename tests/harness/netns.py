"""Two hosts on one machine: network namespaces connected by a virtual cable."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

import pytest


def ip(*words: str) -> None:
    """Runs iproute2.

    Raises:
        RuntimeError: it fails.
    """
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@contextlib.contextmanager
def two_hosts(prefix: str, network: str) -> Iterator[list[str]]:
    """Yields the names of two namespaces with the addresses `network`.1 and `network`.2.

    If they cannot be created, for example without root, the test is skipped.
    """
    names = [f"{prefix}{os.getpid()}h{i}" for i in range(2)]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ends = ("link", "add", "eth0", "netns", names[0], "type", "veth")
            ip(*ends, "peer", "name", "eth0", "netns", names[1])
        except RuntimeError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        for i, name in enumerate(names):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"{network}.{i + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
