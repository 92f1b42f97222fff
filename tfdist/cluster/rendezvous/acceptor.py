"""Accepts connections and performs their handshakes, all in the thread that calls it."""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import time
from collections.abc import Callable

from tfdist.cluster.auth.handshake import (
    Read,
    Steps,
    TlsMismatch,
    Write,
    listening,
    tls_problem,
)
from tfdist.cluster.auth.identity import Identity
from tfdist.cluster.net.descriptors import close_on_fork
from tfdist.cluster.net.framing import WireError
from tfdist.cluster.net.sockets import tune
from tfdist.cluster.net.tls import Tls
from tfdist.cluster.net.tls_socket import TlsSocket
from tfdist.cluster.net.wait_messages import Announce
from tfdist.cluster.rendezvous.rejections import Rejections

ACCEPT_SECONDS = 20.0
"""How long the handshake of a connection may take; its peer may have hundreds to open."""

_MAX_STRANGERS = 256
_LINGER_SECONDS = 1.0


class Pending:
    """A connection whose peer has not proven yet who it is.

    Args:
        sock: non-blocking.
        address: the peer's IP address.
        peer: what messages call it.
        steps: this end of the handshake.
        deadline: the `time.monotonic()` at which to give up.
    """

    def __init__(
        self, sock: socket.socket, address: str, peer: str, steps: Steps, deadline: float
    ) -> None:
        self.sock = sock
        self.address = address
        self.peer = peer
        self.deadline = deadline
        self.ended = False  # only to let the peer read the reason
        self._steps = steps
        self._step = next(steps)
        self._received = bytearray()
        self._unsent = b""

    def advance(self) -> int | Identity:
        """Goes on as far as possible without blocking.

        Returns:
            The `selectors` event to wait for, or the peer's identity once the handshake is
            complete.

        Raises:
            OSError: the connection ended, or TLS failed.
            WireError: the peer is not a tfdist worker, or was rejected.
            TlsMismatch: only one of the two ends uses TLS.
        """
        try:
            while True:
                wait, answer = self._do()
                if wait is not None:
                    return wait
                self._step = self._steps.send(answer)
        except StopIteration as end:
            identity: Identity = end.value
            return identity

    def _do(self) -> tuple[int | None, bytes]:
        """Does the current step; returns what to wait for, or None and the answer."""
        step = self._step
        if isinstance(step, Read):
            return self._read(step.count, step.some)
        if isinstance(step, Write):
            self._unsent = self._unsent or step.data
            while self._unsent:
                try:
                    self._unsent = self._unsent[self.sock.send(self._unsent) :]
                except BlockingIOError:
                    return selectors.EVENT_WRITE, b""
            return None, b""
        assert isinstance(self.sock, TlsSocket)
        if wait := self.sock.begin():
            return wait, b""
        return None, self.sock.certificate_digests()

    def _read(self, count: int, some: bool) -> tuple[int | None, bytes]:
        while (missing := count - len(self._received)) > 0 and not (some and self._received):
            try:
                data = self.sock.recv(missing)
            except BlockingIOError:
                return selectors.EVENT_READ, b""
            if not data:
                raise ConnectionError("connection closed")
            self._received += data
        answer, self._received = bytes(self._received), bytearray()
        return None, answer


class Acceptor:
    """Authenticates incoming connections; silent or slow strangers delay no one.

    When there are too many unauthenticated connections, the oldest one is closed of the address
    that has the most: a flood from one address only displaces itself.

    Args:
        selector: where the connections are registered, with a `Pending` as data; the caller passes
            those to `serve`.
        mine: the identity of this process.
        secret: the job's secret.
        tls: the TLS contexts; None for connections without TLS.
        expected: how many workers may connect at the same time; strangers get extra room.
        screen: inspects the identity of an authenticated peer, and raises WireError to reject it.
        on_accepted: receives a connection, non-blocking, once the peer is being told that it is
            accepted.
        announce: called with lines about rejected connections.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        mine: Identity,
        secret: str,
        tls: Tls | None,
        expected: int,
        screen: Callable[[Identity], None],
        on_accepted: Callable[[socket.socket, Identity], None],
        announce: Announce,
    ) -> None:
        self._selector = selector
        self._mine = mine
        self._secret = secret
        self._tls = tls
        self._room = _MAX_STRANGERS + expected
        self._screen = screen
        self._on_accepted = on_accepted
        self._rejections = Rejections(announce)
        self._pending: dict[Pending, None] = {}  # in the order in which they came

    def accept(self, listener: socket.socket) -> None:
        """Accepts all connections that wait at a non-blocking listener."""
        while True:
            try:
                sock, peer = listener.accept()
            except OSError:  # none is left, or no descriptors are
                return
            try:
                sock.setblocking(False)
                tune(sock)
                if self._tls:
                    sock = self._tls.wrap(sock, dialed=False)
            except OSError:  # the peer is gone
                sock.close()
                continue
            close_on_fork(sock)
            steps = listening(self._mine, self._secret, self._tls is not None, self._screen)
            deadline = time.monotonic() + ACCEPT_SECONDS
            pending = Pending(sock, peer[0], f"{peer[0]}:{peer[1]}", steps, deadline)
            self._pending[pending] = None
            self._selector.register(sock, selectors.EVENT_READ, pending)
            self._make_room()
            if pending in self._pending:
                self.serve(pending)

    def serve(self, pending: Pending) -> None:
        """Goes on with a connection that is ready."""
        if pending not in self._pending:
            return None
        if pending.ended:
            with contextlib.suppress(OSError):
                if socket.socket.recv(pending.sock, 4096):
                    return None
            return self._close(pending)
        try:
            result = pending.advance()
        except (OSError, WireError, TlsMismatch) as error:
            self._reject(pending, error)
        except BaseException:
            self._reject(pending, WireError("it caused an unexpected error"))
            raise
        else:
            if isinstance(result, Identity):
                del self._pending[pending]
                self._selector.unregister(pending.sock)
                self._on_accepted(pending.sock, result)
            else:
                self._selector.modify(pending.sock, result, pending)

    def tick(self) -> None:
        """Gives up connections that are too slow, and reports rejections; call it regularly."""
        now = time.monotonic()
        for pending in [p for p in self._pending if now >= p.deadline]:
            if pending.ended:
                self._close(pending)
            else:
                self._reject(pending, TimeoutError("it was silent or too slow"))
        self._rejections.tick(now)

    def close(self) -> None:
        """Closes the unauthenticated connections, without a line for each."""
        for pending in list(self._pending):
            self._close(pending)
        self._rejections.close()

    def _reject(self, pending: Pending, error: Exception) -> None:
        reason = str(error)
        if isinstance(error, (TlsMismatch, ssl.SSLError)) and (problem := tls_problem(error)):
            reason = f"no TLS: {problem}"
        self._rejections.add(pending.address, pending.peer, reason, time.monotonic())
        # The peer reads the reason, if one was sent, and closes; input that nobody has read would
        # discard it.
        pending.ended = True
        pending.deadline = time.monotonic() + _LINGER_SECONDS
        try:
            socket.socket.shutdown(pending.sock, socket.SHUT_WR)
            self._selector.modify(pending.sock, selectors.EVENT_READ, pending)
        except OSError:
            self._close(pending)

    def _make_room(self) -> None:
        if len(self._pending) <= self._room:
            return
        counts: dict[str, int] = {}
        for pending in self._pending:
            counts[pending.address] = counts.get(pending.address, 0) + 1
        most = max(counts, key=lambda address: counts[address])
        oldest = next(pending for pending in self._pending if pending.address == most)
        if not oldest.ended:
            reason = "too many connections from one address"
            self._rejections.add(oldest.address, oldest.peer, reason, time.monotonic())
        self._close(oldest)

    def _close(self, pending: Pending) -> None:
        del self._pending[pending]
        self._selector.unregister(pending.sock)
        pending.sock.close()
