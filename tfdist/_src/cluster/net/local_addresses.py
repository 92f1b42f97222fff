"""This machine's addresses, and the process that listens on a port (Linux only)."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterator
from pathlib import Path

_LISTENING = "0A"


def local_addresses(proc: str = "/proc") -> list[str]:
    """The IP addresses of this machine's interfaces, loopback last.

    Args:
        proc: where the proc file system is mounted.

    Returns:
        The addresses; empty if they are unknown.

    Example:
        >>> local_addresses()  # doctest: +SKIP
        ['10.0.0.7', '127.0.0.1', '::1']
    """
    found: set[ipaddress.IPv4Address | ipaddress.IPv6Address] = {*_ipv4(proc), *_ipv6(proc)}
    return [str(address) for address in sorted(found, key=lambda a: (a.is_loopback, str(a)))]


def port_holder(port: int, proc: str = "/proc") -> str | None:
    """Names the process that listens on a TCP port of this machine.

    Args:
        port: the port.
        proc: where the proc file system is mounted.

    Returns:
        For example `"process 4711 (python train.py)"`; None if it is unknown, as on other systems
        and for another user's process.

    Example:
        >>> port_holder(2222)  # doctest: +SKIP
        'process 4711 (python train.py)'
    """
    links = {f"socket:[{inode}]" for inode in _listeners(port, proc)}
    if not links:
        return None
    for process in Path(proc).iterdir():
        if not process.name.isdecimal():
            continue
        try:
            if any(_target(entry) in links for entry in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                text = " ".join(command.decode(errors="replace").split())
                return f"process {process.name} ({text[:120]})"
        except OSError:  # it has exited, or belongs to another user
            continue
    return None


def _target(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except OSError:  # closed in the meantime
        return ""


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _listeners(port: int, proc: str) -> Iterator[str]:
    """The inodes of the sockets listening on a port."""
    for table in ("tcp", "tcp6"):
        for line in _lines(f"{proc}/net/{table}")[1:]:
            fields = line.split()
            local, state, inode = fields[1], fields[3], fields[9]
            if state == _LISTENING and int(local.rpartition(":")[2], 16) == port:
                yield inode


def _ipv4(proc: str) -> Iterator[ipaddress.IPv4Address]:
    address = ""
    for line in _lines(f"{proc}/net/fib_trie"):
        if match := re.search(r"\|-- ([\d.]+)", line):
            address = match[1]
        elif "/32 host LOCAL" in line:
            yield ipaddress.IPv4Address(address)


def _ipv6(proc: str) -> Iterator[ipaddress.IPv6Address]:
    for line in _lines(f"{proc}/net/if_inet6"):
        yield ipaddress.IPv6Address(int(line.split()[0], 16))
