"""Connects the native ranks of a run by TCP and by shared memory, without authentication."""

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
    """A rank's connections to the other ranks; the fields are those of `tfd_setup`.

    Attributes:
        name: the name of the group.
        rank: the rank of this process.
        size: the number of ranks in the group.
        ranks: the name of each rank in messages.
        hosts: for each rank, the number of its host.
        control: for each rank, a connected socket; -1 for this process.
        data: for each rank of another host, a connected socket; else -1.
        segment: a descriptor of the memory shared by this host's ranks; -1 for a single rank.
        segment_bytes: the size of this memory.
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
        segment_bytes: returns the size of the shared memory for a number of ranks of one host.
    """
    rank, hosts = arguments.rank, arguments.hosts
    neighbours = hosts.count(hosts[rank])
    bytes_ = segment_bytes(neighbours) if neighbours > 1 else 0
    # Each rank opens the memory by its name. The name is removed after all ranks have connected,
    # because by then they have opened the memory.
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
    """Returns a listener on this rank's address."""
    host, _, port = address.rpartition(":")
    listener = socket.create_server((host, int(port)), backlog=256)
    listener.settimeout(60)
    return listener


def dial(address: str, rank: int, kind: int) -> int:
    """Connects to a rank, which may not listen yet, and sends it this rank and the kind."""
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
