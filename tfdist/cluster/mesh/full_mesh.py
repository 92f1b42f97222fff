"""Connects every rank of a group with every other one: dials those before it, awaits the others."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Sequence
from functools import partial

from tfdist.cluster.auth.compatibility import disagreement
from tfdist.cluster.auth.identity import Identity
from tfdist.cluster.mesh.subgroups import Subgroup
from tfdist.cluster.net.descriptors import not_for_children
from tfdist.cluster.net.framing import WireError
from tfdist.cluster.net.tls import Tls
from tfdist.cluster.net.tls_socket import in_the_clear
from tfdist.cluster.net.wait_messages import Announce, WaitMessages, named
from tfdist.cluster.rendezvous.acceptor import Acceptor
from tfdist.cluster.rendezvous.connector import Connector, Endpoint
from tfdist.cluster.session.lockstep import Said
from tfdist.cluster.spec.topology import Topology
from tfdist.options import Options

CONTROL = "control"
DATA = "data"

_Place = tuple[int, str]
"""Which rank of the group a connection leads to, and which of the two it is."""


class FullMeshConnector:
    """This rank's part in connecting a group.

    Args:
        topology: the session's ranks.
        group: the group of this process.
        listeners: listening sockets, which do not block; the caller closes them.
        options: `start_timeout` and `secret` are used.
        tls: to talk with the others in TLS until they have proven themselves; None for not at all.
        announce: takes lines on strangers, and on who is missing.
    """

    def __init__(
        self,
        topology: Topology,
        group: Subgroup,
        listeners: Sequence[socket.socket],
        options: Options,
        tls: Tls | None,
        announce: Announce,
    ) -> None:
        self._topology = topology
        self._group = group
        self._deadline = time.monotonic() + options.start_timeout
        self._subject = f"mesh {group.identity}"
        self._progress = WaitMessages(topology.me, options.start_timeout, announce)
        self._mine = Identity.of(topology, self._subject)
        self._changed = threading.Condition()  # guards the next four
        self._sockets: dict[_Place, socket.socket] = {}
        self._missing = {
            (rank, kind): "nothing was heard of it"
            for rank in range(group.size)
            if rank != group.rank
            for kind in self._kinds(rank)
        }
        self._error: Exception | None = None
        self._bell, self._ringer = socket.socketpair()
        not_for_children(self._bell)
        not_for_children(self._ringer)
        self._awaited = {
            self._purpose(rank, group.rank, kind): (rank, kind)
            for rank, kind in self._missing
            if rank > group.rank
        }
        self._reception = Acceptor(
            self._mine, options.secret, tls, 2 * group.size, self._screen, self._welcome, announce
        )
        self._listening = threading.Thread(target=self._listen, args=(listeners,), daemon=True)
        self._dialler = Connector(options.secret, tls, self._deadline)

    def start(self) -> None:
        """Begins to listen and to dial; apart from the constructor so that `close` can follow."""
        self._listening.start()
        for rank in range(self._group.rank):
            self._dialler.start([self._call(rank, kind) for kind in self._kinds(rank)])

    def wait(self, seconds: float) -> None:
        """Waits until all connections are made or none will be, or until so much has passed."""
        end = min(self._deadline, time.monotonic() + seconds)
        with self._changed:
            while self._missing and self._error is None and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            missing = sorted({rank for rank, _ in self._missing})
        if missing:
            workers = [self._topology.workers[self._group.members[rank]] for rank in missing]
            self._progress.report(f"connections with {named(workers)}")

    def status(self) -> Said:
        """Says which connections this rank lacks, by the session's ranks from and to.

        Raises:
            Exception: a connection will never be made.
        """
        members = self._group.members
        me = members[self._group.rank]
        with self._changed:
            if self._error is not None:
                raise self._error
            missing = [
                [members[rank], me, kind, why]
                if rank > self._group.rank
                else [me, members[rank], kind, why]
                for (rank, kind), why in self._missing.items()
            ]
        return {"missing": missing, "late": time.monotonic() >= self._deadline}

    def finish(self) -> dict[_Place, socket.socket]:
        """Ends the threads where all ranks have all connections.

        Returns:
            The connections, which do not block.
        """
        self._end()
        for sock in self._sockets.values():
            sock.setblocking(False)
        return self._sockets

    def close(self) -> None:
        """Gives up, and closes all connections."""
        self._end()
        for sock in self._sockets.values():
            sock.close()

    def _end(self) -> None:
        self._dialler.close()
        self._ringer.send(b"!")
        if self._listening.is_alive():
            self._listening.join()
        # Welcomes those still that were told that they are accepted.
        self._reception.close()
        self._bell.close()
        self._ringer.close()

    def _kinds(self, rank: int) -> tuple[str, ...]:
        apart = self._group.hosts[rank] != self._group.hosts[self._group.rank]
        return (CONTROL, DATA) if apart else (CONTROL,)

    def _purpose(self, dialler: int, dialled: int, kind: str) -> str:
        return f"{self._subject} {kind} {dialler}>{dialled}"

    def _listen(self, listeners: Sequence[socket.socket]) -> None:
        with selectors.DefaultSelector() as selector:
            for sock in (*listeners, self._bell):
                selector.register(sock, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._bell:
                        return
                    self._reception.accept(key.fileobj)  # type: ignore[arg-type]

    def _screen(self, hello: Identity) -> None:
        """Refuses a newcomer that is not one of the awaited connections."""
        if error := disagreement(self._mine, hello):
            raise WireError(str(error))
        place = self._awaited.get(hello.purpose)
        if place is None or hello.rank != self._group.members[place[0]]:
            raise WireError(f"{hello} came for {hello.purpose!r}, which is not awaited here")

    def _welcome(self, sock: socket.socket, hello: Identity) -> None:
        # Who comes again for a place did not get our word the first time.
        self._made(self._awaited[hello.purpose], sock)

    def _call(self, rank: int, kind: str) -> Endpoint:
        place = (rank, kind)
        return Endpoint(
            name=str(self._topology.workers[self._group.members[rank]]),
            address=self._group.addresses[rank],
            ports=self._group.ports[rank],
            hello=Identity.of(self._topology, self._purpose(self._group.rank, rank, kind)),
            screen=partial(self._screen_dialled, rank),
            made=partial(self._made, place),
            failed=partial(self._failed, place),
        )

    def _screen_dialled(self, rank: int, hello: Identity) -> None:
        if hello.rank != self._group.members[rank] or hello.purpose != self._subject:
            raise WireError(f"{hello} answers there")

    def _made(self, place: _Place, sock: socket.socket) -> None:
        # The core cannot take over Python's TLS; it begins its own.
        sock = not_for_children(in_the_clear(sock))
        with self._changed:
            if known := self._sockets.get(place):
                known.close()
            self._sockets[place] = sock
            self._missing.pop(place, None)
            self._changed.notify_all()

    def _failed(self, place: _Place, error: Exception) -> None:
        """Keeps why an attempt to dial failed; a final error is that of the whole group."""
        with self._changed:
            if isinstance(error, (OSError, WireError)):
                self._missing[place] = getattr(error, "strerror", None) or str(error)
                return
            self._error = error
            self._changed.notify_all()
