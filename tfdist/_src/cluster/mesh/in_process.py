"""Connects ranks that are threads of this process; `mesh` connects processes."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Sequence

from tfdist._src.cluster.mesh.mesh import Mesh
from tfdist._src.cluster.mesh.shared_memory import SegmentBytes
from tfdist._src.cluster.net.descriptors import Descriptor, close_on_fork


def connect_threads(name: str, ranks: Sequence[str], segment_bytes: SegmentBytes) -> list[Mesh]:
    """Connects ranks of this process with each other.

    Args:
        name: name of the group, for messages.
        ranks: what messages call each rank.
        segment_bytes: returns the size of the memory shared by a number of ranks, >= 1.

    Returns:
        The mesh of each rank.

    Raises:
        OSError: out of memory or descriptors.

    Example:
        >>> from tfdist._src.cluster.mesh.in_process import connect_threads
        >>> [mesh.rank for mesh in connect_threads("devices", ["CPU:0", "CPU:1"], lambda n: 4096)]
        [0, 1]
    """
    size = len(ranks)
    control = [[-1] * size for _ in ranks]
    owned: list[list[Descriptor | socket.socket]] = [[] for _ in ranks]
    for pair in itertools.combinations(range(size), 2):
        for rank, peer, sock in zip(pair, reversed(pair), socket.socketpair(), strict=True):
            sock.setblocking(False)
            control[rank][peer] = sock.fileno()
            owned[rank].append(close_on_fork(sock))
    memory = os.memfd_create("tfdist", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(memory, 0, segment_bytes(size))
        segments = [close_on_fork(Descriptor(os.dup(memory))) for _ in ranks]
    finally:
        os.close(memory)
    return [
        Mesh(
            name=f"{name}, {ranks[rank]}",
            rank=rank,
            size=size,
            ranks=tuple(ranks),
            hosts=(0,) * size,
            control=tuple(control[rank]),
            data=(-1,) * size,
            segment=segments[rank].fileno(),
            segment_bytes=segment_bytes(size),
            _sockets=tuple(owned[rank]),
            _memory=segments[rank],
        )
        for rank in range(size)
    ]
