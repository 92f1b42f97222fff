"""Measures the start of tfdist's ranks, without TensorFlow. The benchmark runs this program."""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.joining.forked import Row, measure
from tfdist._src.cluster import connect, from_tf_config, meet
from tfdist._src.comm.native_communicator import setup_of
from tfdist._src.native import load
from tfdist._src.options import Options

_SECRET = "joining"


class Sent:
    """Counts the bytes that Python code of this process sends through sockets.

    The constructor replaces the methods `send` and `sendall` of all sockets.
    """

    def __init__(self) -> None:
        self.bytes = 0
        send, sendall = socket.socket.send, socket.socket.sendall

        def counted(one: socket.socket, data: Any, *flags: int) -> int:
            sent = send(one, data, *flags)
            self.bytes += sent
            return sent

        def all_counted(one: socket.socket, data: Any, *flags: int) -> None:
            sendall(one, data, *flags)
            self.bytes += len(data)

        socket.socket.send = counted  # type: ignore[method-assign, assignment]
        socket.socket.sendall = all_counted  # type: ignore[method-assign, assignment]


def join(
    rank: int, addresses: list[str], ranks_per_host: int, timeout: float, core: ctypes.CDLL
) -> tuple[Row, Callable[[], None]]:
    """Connects one rank to all other ranks, creates a communicator, and calls a barrier.

    Args:
        rank: the rank.
        addresses: the addresses of all ranks.
        ranks_per_host: the number of consecutive ranks that tfdist treats as one host.
        timeout: the timeout of the start, in seconds.
        core: the library of the native core.

    Returns:
        The measurements, and a function that shuts the rank down; see `forked.measure`.
    """
    sent = Sent() if rank == 0 else None
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
    options = Options(start_timeout=timeout, secret=_SECRET, host=f"host {rank // ranks_per_host}")
    times = [time.monotonic()]
    session = meet(from_tf_config(json.dumps(config)), options)
    times.append(time.monotonic())
    mesh = connect(session, "all", range(session.size), options, core.tfd_segment_bytes)
    assert mesh is not None
    times.append(time.monotonic())
    setup, number = setup_of(mesh, options), ctypes.c_int64()
    mesh.hand_over()
    if core.tfd_create(ctypes.byref(setup), ctypes.byref(number)):
        raise RuntimeError(core.tfd_error().decode())
    if core.tfd_barrier(number, b""):
        raise RuntimeError(core.tfd_error().decode())
    times.append(time.monotonic())

    def end() -> None:
        core.tfd_close(number)
        session.close()

    stages = [later - earlier for earlier, later in itertools.pairwise(times)]
    row = dict(zip(("rendezvous_s", "mesh_s", "core_s"), stages, strict=True))
    return {**row, "sent_bytes": sent.bytes if sent else 0}, end


def main() -> None:
    """Measures one number of ranks, and prints the result as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("ranks", type=int)
    parser.add_argument("ranks_per_host", type=int)
    parser.add_argument("idle", type=float)
    parser.add_argument("timeout", type=float)
    arguments = parser.parse_args()
    reserved = [socket.create_server(("127.0.0.1", 0)) for _ in range(arguments.ranks)]
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in reserved]
    for one in reserved:
        one.close()
    one_rank = partial(
        join,
        addresses=addresses,
        ranks_per_host=arguments.ranks_per_host,
        timeout=arguments.timeout,
        core=load().library,
    )
    print("ROW " + json.dumps(measure(arguments.ranks, one_rank, arguments.idle)), flush=True)


if __name__ == "__main__":
    main()
