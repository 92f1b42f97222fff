"""Rank 0's side of the rendezvous: listens until all others have come, or tells them why not."""

from __future__ import annotations

import queue
import selectors
import socket
import time
from collections.abc import Sequence

from tfdist.cluster.auth.compatibility import disagreement, duplicate
from tfdist.cluster.auth.identity import JOIN, Identity
from tfdist.cluster.net.framing import Header, WireError, encode
from tfdist.cluster.net.sockets import has_ended, send_at_once
from tfdist.cluster.net.tls import Tls
from tfdist.cluster.net.wait_messages import Announce, WaitMessages, named
from tfdist.cluster.rendezvous.acceptor import Acceptor
from tfdist.cluster.session.error_codec import encode_error
from tfdist.cluster.spec.topology import Topology
from tfdist.errors import RendezvousError, TfdistError
from tfdist.options import Options

STATUS_SECONDS = 2.0
_LINGER_SECONDS = 2.0
_SLICE = 0.2


class RendezvousServer:
    """One gathering of all workers at rank 0.

    A `Acceptor` talks to the newcomers; the caller's thread alone decides on those who have
    proven that they hold the secret.

    Args:
        topology: the group; this process is its rank 0.
        listeners: sockets that listen at this process's address; the caller closes them.
        options: `start_timeout` and `secret` are used.
        tls: for connections with TLS; None for those in the clear.
        announce: takes the lines on who is missing.
    """

    def __init__(
        self,
        topology: Topology,
        listeners: Sequence[socket.socket],
        options: Options,
        tls: Tls | None,
        announce: Announce,
    ) -> None:
        self._topology = topology
        self._listeners = listeners
        self._timeout = timeout = options.start_timeout
        self._announce = announce
        self._mine = Identity.of(topology)
        self._progress = WaitMessages(topology.me, timeout, announce)
        self._present: dict[int, tuple[socket.socket, Identity]] = {}
        self._verdict: TfdistError | None = None
        self._told: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._bell, self._ringer = socket.socketpair()
        self._arrivals: queue.SimpleQueue[tuple[socket.socket, Identity]] = queue.SimpleQueue()
        self._reception = Acceptor(
            self._mine, options.secret, tls, 2 * topology.size, _screen, self._arrive, announce
        )

    def run(self) -> dict[int, socket.socket]:
        """Waits for all.

        Returns:
            The connection to every other rank.

        Raises:
            ClusterError: a worker that came holds another cluster, rank or version of tfdist.
            RendezvousError: not all came in time.
        """
        deadline = time.monotonic() + self._timeout
        try:
            for sock in (*self._listeners, self._bell):
                sock.setblocking(False)
                self._selector.register(sock, selectors.EVENT_READ)
            self._await_all(deadline)
        except BaseException:
            for sock, _ in self._present.values():
                sock.close()
            raise
        finally:
            self._close()
        for sock, _ in self._present.values():
            send_at_once(sock, encode({"kind": "go"}))
        return {rank: sock for rank, (sock, _) in self._present.items()}

    def _await_all(self, deadline: float) -> None:
        next_status = 0.0
        while self._verdict is None and (missing := self._missing()):
            self._progress.report(
                f"{len(missing)} of {self._topology.size} workers: "
                f"{named([self._topology.workers[rank] for rank in missing])}"
            )
            self._poll()
            if time.monotonic() >= next_status:
                next_status = time.monotonic() + STATUS_SECONDS
                self._tell({"kind": "waiting", "missing": self._missing()})
            if time.monotonic() >= deadline and self._missing():
                self._condemn(self._late())
                break
        if self._verdict is not None:
            end = min(deadline, time.monotonic() + _LINGER_SECONDS)
            while len(self._told) < self._topology.size - 1 and time.monotonic() < end:
                self._poll()
            raise self._verdict

    def _missing(self) -> list[int]:
        if len(self._present) == self._topology.size - 1:
            for rank, (sock, _) in list(self._present.items()):
                if has_ended(sock):
                    self._forget(rank)
        return [rank for rank in range(1, self._topology.size) if rank not in self._present]

    def _late(self) -> TfdistError:
        missing = [self._topology.workers[rank] for rank in self._missing()]
        return RendezvousError(
            f"{len(missing)} of {self._topology.size} workers did not come within "
            f"{self._timeout:g} s: {named(missing)}. Start them, see in their logs "
            f"why they ended, or set TFDIST_START_TIMEOUT to wait longer."
        )

    def _poll(self) -> None:
        """Handles what happens within a slice; a short one, so that signals are obeyed."""
        for key, _ in self._selector.select(_SLICE):
            if key.fileobj is self._bell:
                self._bell.recv(4096)
            elif key.fileobj in self._listeners:
                self._reception.accept(key.fileobj)  # type: ignore[arg-type]
            elif (rank := key.data) in self._present and self._present[rank][0] is key.fileobj:
                self._forget(rank)
        while not self._arrivals.empty():
            self._admit(*self._arrivals.get())

    def _arrive(self, sock: socket.socket, hello: Identity) -> None:
        """Hands a newcomer to the thread that decides."""
        self._arrivals.put((sock, hello))
        self._ringer.send(b"!")

    def _admit(self, sock: socket.socket, hello: Identity) -> None:
        """Decides on a newcomer who has said who it is."""
        rank = hello.rank
        sock.setblocking(False)
        error: TfdistError | None = disagreement(self._mine, hello)
        if error is None:
            known = self._present.get(rank)
            if known and (known[1].nonce == hello.nonce or has_ended(known[0])):
                self._forget(rank)
            elif known or rank == 0:
                error = duplicate(known[1] if known else self._mine, hello)
        if error is not None:
            self._condemn(error)
        if self._verdict is not None:
            send_at_once(sock, encode(encode_error("error", self._verdict)))
            sock.close()
            self._told.add(rank)
            return
        self._present[rank] = (sock, hello)
        self._selector.register(sock, selectors.EVENT_READ, rank)
        self._tell({"kind": "waiting", "missing": self._missing()}, only=rank)

    def _condemn(self, error: TfdistError) -> None:
        """Ends the gathering with an error, told to all who are here and who still come."""
        if self._verdict is None:
            self._verdict = error
            self._tell(encode_error("error", error))
            self._told.update(self._present)

    def _tell(self, header: Header, only: int | None = None) -> None:
        frame = encode(header)
        for rank, (sock, _) in list(self._present.items()):
            if only in (None, rank) and not send_at_once(sock, frame):
                self._forget(rank)

    def _forget(self, rank: int) -> None:
        """Drops a worker that went away before all had come."""
        sock, hello = self._present.pop(rank)
        self._selector.unregister(sock)
        sock.close()
        if self._verdict is None:
            self._announce(f"tfdist: {hello} went away while the others were awaited")

    def _close(self) -> None:
        self._reception.close()
        while not self._arrivals.empty():
            self._arrivals.get()[0].close()
        self._bell.close()
        self._ringer.close()
        self._selector.close()


def _screen(hello: Identity) -> None:
    if hello.purpose != JOIN:
        raise WireError(f"{hello} came for {hello.purpose!r}, where workers join the job")
