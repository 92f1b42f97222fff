"""The hosts of a job and how many workers each runs, as mpirun and horovodrun write them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_SLOTS = re.compile(r"(?<![-_\w])slots\s*=\s*(\S+)", re.IGNORECASE)


@dataclass(frozen=True)
class ListedHost:
    """One host.

    Attributes:
        name: what ssh is passed: a name, an address, `user@host`, or an alias of its
            configuration.
        workers: the number of its workers; None for one per GPU, or one without GPUs.
    """

    name: str
    workers: int | None = None

    @property
    def address(self) -> str:
        """The name without the user."""
        return self.name.rpartition("@")[2]


def parse_hosts(text: str) -> tuple[ListedHost, ...]:
    """Parses a list of hosts.

    Args:
        text: `"host:workers"` or `"host"`, separated by commas; an IPv6 address with a number of
            workers is in brackets.

    Raises:
        ValueError: the list is empty or malformed, or names a host twice.

    Example:
        >>> [(host.name, host.workers) for host in parse_hosts("gpu1:2,[fd00::2]:4,gpu3")]
        [('gpu1', 2), ('fd00::2', 4), ('gpu3', None)]
    """
    return _checked(_parse_host(part.strip()) for part in text.split(",") if part.strip())


def read_hostfile(path: str) -> tuple[ListedHost, ...]:
    """Reads a file with one host per line.

    Args:
        path: its path; a line is `host`, `host slots=4` or `host:4`, `#` begins a comment.

    Raises:
        ValueError: the file cannot be read, or as in `parse_hosts`.

    Example:
        >>> Path("hosts").write_text("gpu1 slots=2\\ngpu2:4  # the new one\\n")  # doctest: +SKIP
        >>> read_hostfile("hosts")  # doctest: +SKIP
        (ListedHost(name='gpu1', workers=2), ListedHost(name='gpu2', workers=4))
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    stripped = (line.partition("#")[0].strip() for line in lines)
    try:
        return _checked(_parse_line(line) for line in stripped if line)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _parse_line(line: str) -> ListedHost:
    name, *rest = line.split(maxsplit=1)
    if not rest:
        return _parse_host(name)
    slots, host = _SLOTS.search(rest[0]), _parse_host(name)
    if slots is None or host.workers is not None:
        raise ValueError(f"a line must be HOST, HOST:N or HOST slots=N. Received: {line!r}")
    return ListedHost(host.name, _workers(slots.group(1), line))


def _parse_host(text: str) -> ListedHost:
    user, at, host = text.rpartition("@")
    if host.startswith("["):
        address, _, rest = host[1:].partition("]")
        colon, workers = rest[:1], rest[1:]
        if rest and colon != ":":
            raise ValueError(f"must be HOST or HOST:N. Received: {text!r}")
    elif host.count(":") > 1:
        address, colon, workers = host, "", ""
    else:
        address, colon, workers = host.partition(":")
    name = _name(f"{user}{at}{address}")
    return ListedHost(name, _workers(workers, text) if colon else None)


def _name(name: str) -> str:
    # An option of ssh, such as -oProxyCommand=…, must not pass for a host.
    if not name or name.startswith("-") or not name.isprintable() or " " in name:
        raise ValueError(f"must name a host. Received: {name!r}")
    return name


def _workers(text: str, whole: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) >= 1):
        raise ValueError(f"the number of workers must be an integer >= 1. Received: {whole!r}")
    return int(text)


def _checked(hosts: Iterable[ListedHost]) -> tuple[ListedHost, ...]:
    listed = tuple(hosts)
    if not listed:
        raise ValueError("must name at least one host")
    names = [host.name for host in listed]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"names {name} twice: give the number of all its workers once")
    return listed
