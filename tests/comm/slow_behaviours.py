"""What ranks do over a connection that is slow for a while."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import tensorflow as tf

import tfdist
from tests.comm.behaviours import message
from tfdist._src.comm import native_communicator

# Less than is sent while it is slow.
_FEW_BYTES, _PAUSE = 512, 0.005
_ELEMENTS = 300_000


class Relay:
    """Passes on what ranks of two hosts send each other, for a while slowly.

    Attributes:
        slow_until: the end of that, by `time.monotonic`.
    """

    def __init__(self) -> None:
        self.slow_until = 0.0

    @contextlib.contextmanager
    def between_hosts(self) -> Iterator[None]:
        """Has the data connections of groups that are opened meanwhile pass through it."""
        setup_of = native_communicator.setup_of

        def relayed(mesh, *arguments):
            setup = setup_of(mesh, *arguments)
            for rank, descriptor in enumerate(mesh.data):
                if descriptor >= 0:
                    setup.data[rank] = self._relayed(descriptor)
            return setup

        native_communicator.setup_of = relayed
        try:
            yield
        finally:
            native_communicator.setup_of = setup_of

    def _relayed(self, descriptor: int) -> int:
        far = socket.socket(fileno=descriptor)
        far.setblocking(True)
        near, given = socket.socketpair()
        for end in (near, given):
            # Else all bytes are soon on their way.
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        for ends in ((near, far), (far, near)):
            threading.Thread(target=self._pass_on, args=ends, daemon=True).start()
        return given.detach()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while received := source.recv(1 << 16):
                while received:
                    slow = time.monotonic() < self.slow_until
                    time.sleep(_PAUSE if slow else 0)
                    some = _FEW_BYTES if slow else len(received)
                    target.sendall(received[:some])
                    received = received[some:]
            target.shutdown(socket.SHUT_WR)


def at_the_end_of_the_data(strategy, seconds):
    """The step of two ranks ends while a sum over a slow connection is on its way.

    Returns:
        How it ended, for how long that took, and a sum behind it.
    """
    world, relay = tfdist.collective.communicator(), Relay()
    with relay.between_hosts() if world.rank == 0 else contextlib.nullcontext():
        group = world.split("slow", [0, 1])

    @tf.function
    def step(iterator, x):
        total = tfdist.collective.all_reduce(x, communicator="slow")
        return total, next(iterator)

    iterator, x = iter(tf.data.Dataset.range(0)), tf.ones([_ELEMENTS])
    step.get_concrete_function(iterator, x)
    tfdist.collective.barrier(communicator="slow")
    began = time.monotonic()
    relay.slow_until = began + seconds
    ended = message(lambda: step(iterator, x))
    took = time.monotonic() - began
    behind = float(tfdist.collective.all_reduce(1.0, communicator="slow"))
    group.close()
    return ended, took, behind
