"""What a process's handles on one communicator share, and what changes when it is opened again."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tfdist._src import native
from tfdist._src.cluster import Mesh, Session
from tfdist._src.comm import at_exit
from tfdist._src.comm.core_setup import setup_of
from tfdist._src.comm.gpu import Gpu
from tfdist._src.comm.traffic import Traffic
from tfdist._src.native.api import Link, Statistics
from tfdist._src.options import Options

CLOSED = 0
"""The number of no communicator of the core."""

_INVALID_ARGUMENT = 1


@dataclass
class Context:
    """This process's place in an open communicator of the core.

    Attributes:
        number: the core's number of the communicator.
        rank: this process's rank.
        size: the number of ranks.
        hosts: for each rank, the number of its host.
        session: the job's control connections; None if all ranks are threads.
        gpus: what it needs to work in the memory of GPUs; none for the host's.
    """

    number: int
    rank: int
    size: int
    hosts: tuple[int, ...]
    session: Session | None
    gpus: tuple[Gpu, ...] = ()

    def open(self, mesh: Mesh, options: Options, session: Session | None) -> None:
        """Opens a communicator of the core over a mesh, and takes over its descriptors.

        Raises:
            NativeUnavailableError: the core cannot be compiled or loaded.
            ValueError: `TFDIST_ALGORITHM` is not the name of an algorithm, or a GPU cannot be
                used.
        """
        core = native.load().library
        native.load_ops()
        number = ctypes.c_int64()
        setup = setup_of(mesh, options, self.gpus)
        # The core closes the memory's descriptor at once, and the sockets if it fails. Until it has
        # taken them over, a forked child closes them for Python.
        mesh.hand_over_segment()
        try:
            check(core, core.tfd_create(ctypes.byref(setup), ctypes.byref(number)))
        finally:
            mesh.hand_over()
        self.number, self.session = number.value, session
        self.rank, self.size, self.hosts = mesh.rank, mesh.size, mesh.hosts
        at_exit.add(self.number, self.aborter(), mesh.ranks[mesh.rank])

    def traffic(self) -> Traffic:
        """What has crossed sockets, shared memory and the links between GPUs so far."""
        core, statistics = native.load().library, Statistics()
        check(core, core.tfd_get_statistics(self.number, ctypes.byref(statistics)))
        return Traffic(
            statistics.collectives,
            statistics.shared_bytes,
            statistics.sent_bytes,
            statistics.received_bytes,
            statistics.device_bytes,
        )

    def links(self) -> list[Link]:
        """The kernel's counts of the connection to each rank."""
        core, links = native.load().library, (Link * self.size)()
        check(core, core.tfd_get_links(self.number, links))
        return list(links)

    def aborter(self) -> Callable[[str], None]:
        """Fails the operations of what is open now, but not of what is opened later."""
        core, number = native.load().library, self.number

        def abort(message: str) -> None:
            core.tfd_abort(number, message.encode())

        return abort

    def close(self) -> None:
        """Waits for pending operations and closes the communicator; idempotent."""
        at_exit.discard(self.number)
        native.load().library.tfd_close(self.number)


def closed(gpus: Sequence[Gpu] = ()) -> Context:
    """A context that has not been opened."""
    return Context(CLOSED, 0, 1, (0,), None, tuple(gpus))


def check(core: Any, code: int) -> None:
    """Raises the core's error if a call has failed.

    Raises:
        ValueError: the arguments were invalid.
        RuntimeError: any other error.
    """
    if code:
        message = core.tfd_error().decode(errors="replace")
        raise ValueError(message) if code == _INVALID_ARGUMENT else RuntimeError(message)
