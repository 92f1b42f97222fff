"""Connects the ranks of the backends that use tfdist's core, without authentication.

All ranks are connected by TCP. Ranks on the same host also share a memory segment.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.all_reduce.ranks.rank import Arguments

HELLO = struct.Struct("!ii")
KINDS = ("control", "data")


@dataclass(frozen=True)
class Mesh:
    """A rank's connections to the other ranks. The fields have the same names in `tfd_setup`.

    Attributes:
        name: the name of the group.
        rank: the rank of this process.
        size: the number of ranks in the group.
        ranks: for each rank, its name in messages.
        hosts: for each rank, the number of its host.
        control: for each rank, the descriptor of a socket that is connected to the rank; -1 for the
            rank of this process.
        data: for each rank on another host, the descriptor of a second socket that is connected to
            the rank; -1 for the ranks on this host.
        segment: the descriptor of the memory that the ranks on this host share; -1 if this host has
            only one rank.
        segment_bytes: the size of the shared memory.
    """

    name: str
    rank: int
    size: int
    ranks: Sequence[str]
    hosts: Sequence[int]
    control: Sequence[int]
    data: Sequence[int]
    segment: int
    segment_bytes: int


def connect(arguments: Arguments, segment_bytes: Callable[[int], int]) -> Mesh:
    """Connects this rank to all other ranks.

    Args:
        arguments: the arguments of the command line.
        segment_bytes: a function that takes the number of ranks on a host, and returns the size of
            the memory that these ranks must share.
    """
    rank, hosts = arguments.rank, arguments.hosts
    neighbours = hosts.count(hosts[rank])
    bytes_ = segment_bytes(neighbours) if neighbours > 1 else 0
    # All ranks of a host open the shared memory by the same name. A rank opens the memory before it
    # connects to the other ranks. So this rank can remove the name after all ranks have connected.
    path = f"/dev/shm/{arguments.control.strip('/').replace('/', '-')}-{hosts[rank]}"
    segment = -1
    if bytes_:
        segment = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(segment, bytes_)
    links = {kind: [-1] * arguments.size for kind in KINDS}
    with listen(arguments.addresses[rank]) as listener:
        for peer in range(rank):
            for number, kind in enumerate(KINDS):
                if kind == "control" or hosts[peer] != hosts[rank]:
                    links[kind][peer] = dial(arguments.addresses[peer], rank, number)
        expected = sum(2 if h != hosts[rank] else 1 for h in hosts[rank + 1 :])
        for _ in range(expected):
            link, _ = listener.accept()
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer, number = HELLO.unpack(link.recv(HELLO.size, socket.MSG_WAITALL))
            links[KINDS[number]][peer] = link.detach()
    if bytes_:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    names = [f"rank {i} ({address})" for i, address in enumerate(arguments.addresses)]
    return Mesh(
        "all_reduce", rank, arguments.size, names, hosts, **links, segment=segment,
        segment_bytes=bytes_,
    )  # fmt: skip


def listen(address: str) -> socket.socket:
    """Returns a socket that listens on an address of the form `host:port`."""
    host, _, port = address.rpartition(":")
    listener = socket.create_server((host, int(port)), backlog=256)
    listener.settimeout(60)
    return listener


def dial(address: str, rank: int, kind: int) -> int:
    """Connects to a rank, and returns the descriptor of the socket.

    If the other rank does not listen yet, retries for up to a minute. Then sends the rank of this
    process and the kind of connection, so that the other rank can identify the connection.

    Args:
        address: the address of the other rank.
        rank: the rank of this process.
        kind: an index into `KINDS`.
    """
    host, _, port = address.rpartition(":")
    end = time.monotonic() + 60
    while True:
        try:
            link = socket.create_connection((host, int(port)), timeout=60)
            break
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
    link.settimeout(None)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.sendall(HELLO.pack(rank, kind))
    return link.detach()
