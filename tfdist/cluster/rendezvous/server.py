"""The rendezvous on rank 0: listens until all others have arrived, or tells them of a failure."""

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
_POLL_SECONDS = 0.2


class RendezvousServer:
    """Gathers all workers at rank 0.

    An `Acceptor` authenticates the workers; only the calling thread admits them.

    Args:
        topology: the group; this process is rank 0.
        listeners: sockets listening at this process's address; the caller closes them.
        options: `start_timeout` and `secret` are used.
        tls: the TLS contexts; None for connections without TLS.
        announce: called with each line about missing workers.
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
        self._error: TfdistError | None = None
        self._informed: set[int] = set()  # of the error
        self._selector = selectors.DefaultSelector()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._arrivals: queue.SimpleQueue[tuple[socket.socket, Identity]] = queue.SimpleQueue()
        self._acceptor = Acceptor(
            self._mine, options.secret, tls, 2 * topology.size, _screen, self._enqueue, announce
        )

    def run(self) -> dict[int, socket.socket]:
        """Waits for all workers.

        Returns:
            The connection to every other rank.

        Raises:
            ClusterError: a worker has a different cluster or tfdist version, or an invalid or
                duplicate rank.
            RendezvousError: some worker did not arrive in time.
        """
        deadline = time.monotonic() + self._timeout
        try:
            for sock in (*self._listeners, self._wake_receiver):
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
        while self._error is None and (missing := self._missing()):
            self._progress.report(
                f"{len(missing)} of {self._topology.size} workers: "
                f"{named([self._topology.workers[rank] for rank in missing])}"
            )
            self._poll()
            if time.monotonic() >= next_status:
                next_status = time.monotonic() + STATUS_SECONDS
                self._send({"kind": "waiting", "missing": self._missing()})
            if time.monotonic() >= deadline and self._missing():
                self._fail(self._timeout_error())
                break
        if self._error is not None:
            end = min(deadline, time.monotonic() + _LINGER_SECONDS)
            while len(self._informed) < self._topology.size - 1 and time.monotonic() < end:
                self._poll()
            raise self._error

    def _missing(self) -> list[int]:
        if len(self._present) == self._topology.size - 1:
            for rank, (sock, _) in list(self._present.items()):
                if has_ended(sock):
                    self._drop(rank)
        return [rank for rank in range(1, self._topology.size) if rank not in self._present]

    def _timeout_error(self) -> TfdistError:
        missing = [self._topology.workers[rank] for rank in self._missing()]
        return RendezvousError(
            f"{len(missing)} of {self._topology.size} workers did not arrive within "
            f"{self._timeout:g} s: {named(missing)}. Start them, check in their logs why they "
            f"exited, or increase TFDIST_START_TIMEOUT."
        )

    def _poll(self) -> None:
        """Handles pending events; returns soon, so that signals are handled."""
        for key, _ in self._selector.select(_POLL_SECONDS):
            if key.fileobj is self._wake_receiver:
                self._wake_receiver.recv(4096)
            elif key.fileobj in self._listeners:
                self._acceptor.accept(key.fileobj)  # type: ignore[arg-type]
            elif (rank := key.data) in self._present and self._present[rank][0] is key.fileobj:
                self._drop(rank)
        while not self._arrivals.empty():
            self._admit(*self._arrivals.get())

    def _enqueue(self, sock: socket.socket, hello: Identity) -> None:
        """Passes an authenticated worker to the thread that admits it."""
        self._arrivals.put((sock, hello))
        self._wake_sender.send(b"!")

    def _admit(self, sock: socket.socket, hello: Identity) -> None:
        """Admits or rejects an authenticated worker."""
        rank = hello.rank
        sock.setblocking(False)
        error: TfdistError | None = disagreement(self._mine, hello)
        if error is None:
            known = self._present.get(rank)
            if known and (known[1].nonce == hello.nonce or has_ended(known[0])):
                self._drop(rank)
            elif known or rank == 0:
                error = duplicate(known[1] if known else self._mine, hello)
        if error is not None:
            self._fail(error)
        if self._error is not None:
            send_at_once(sock, encode(encode_error("error", self._error)))
            sock.close()
            self._informed.add(rank)
            return
        self._present[rank] = (sock, hello)
        self._selector.register(sock, selectors.EVENT_READ, rank)
        self._send({"kind": "waiting", "missing": self._missing()}, only=rank)

    def _fail(self, error: TfdistError) -> None:
        """Fails the rendezvous with an error, sent to present workers and later arrivals."""
        if self._error is None:
            self._error = error
            self._send(encode_error("error", error))
            self._informed.update(self._present)

    def _send(self, header: Header, only: int | None = None) -> None:
        frame = encode(header)
        for rank, (sock, _) in list(self._present.items()):
            if only in (None, rank) and not send_at_once(sock, frame):
                self._drop(rank)

    def _drop(self, rank: int) -> None:
        """Drops a worker that disconnected before all had arrived."""
        sock, hello = self._present.pop(rank)
        self._selector.unregister(sock)
        sock.close()
        if self._error is None:
            self._announce(f"tfdist: {hello} disconnected while waiting for the others")

    def _close(self) -> None:
        self._acceptor.close()
        while not self._arrivals.empty():
            self._arrivals.get()[0].close()
        self._wake_receiver.close()
        self._wake_sender.close()
        self._selector.close()


def _screen(hello: Identity) -> None:
    if hello.purpose != JOIN:
        raise WireError(f"{hello} connected for {hello.purpose!r}, but this is for joining the job")
