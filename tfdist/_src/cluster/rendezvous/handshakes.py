"""Performs many handshakes at once, all in the thread that calls it."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable
from functools import partial

from tfdist._src.cluster.auth.handshake import Read, Steps, TlsMismatch, Write
from tfdist._src.cluster.auth.identity import Identity
from tfdist._src.cluster.net.framing import WireError
from tfdist._src.cluster.net.tls_socket import TlsSocket
from tfdist.errors import TfdistError

_CHUNK = 4096
_LINGER_SECONDS = 1.0


class Pending:
    """A connection whose peer has not proven yet who it is.

    Args:
        sock: non-blocking.
        address: the peer's IP address.
        steps: this end of the handshake.
        deadline: the `time.monotonic()` at which to give up.
        on_done: receives the peer's identity.
        on_failed: receives the reason why there is none.
    """

    def __init__(
        self,
        sock: socket.socket,
        address: str,
        steps: Steps,
        deadline: float,
        on_done: Callable[[Identity], None],
        on_failed: Callable[[Exception], None],
    ) -> None:
        self.sock = sock
        self.address = address
        self.deadline = deadline
        self.on_done = on_done
        self.on_failed = on_failed
        self.ended = False  # only to let the peer read the reason
        self.event = 0  # for which it is registered
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
            TfdistError: this end dials, and the two cannot work together.
        """
        try:
            while True:
                wait, answer = self._do()
                if wait is not None:
                    return wait
                self._step = self._steps.send(answer)
        except StopIteration as end:
            self._check_all_read()
            identity: Identity = end.value
            return identity

    def _check_all_read(self) -> None:
        """Each end waits for the other's answer before it says more."""
        if self._received:
            raise WireError("it sent more than the handshake")

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
        self._check_all_read()
        if wait := self.sock.begin():
            return wait, b""
        return None, self.sock.certificate_digests()

    def _read(self, count: int, some: bool) -> tuple[int | None, bytes]:
        while len(self._received) < (1 if some else count):
            try:
                data = self.sock.recv(_CHUNK)
            except BlockingIOError:
                return selectors.EVENT_READ, b""
            if not data:
                raise ConnectionError("connection closed")
            self._received += data
        answer = bytes(self._received[:count])
        del self._received[:count]
        return None, answer


class Handshakes:
    """The handshakes of one thread; a slow one delays no other.

    Args:
        selector: where the connections are registered, with a function to call as data.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self.pending: dict[Pending, None] = {}  # in the order in which they began

    def begin(self, pending: Pending) -> None:
        """Begins a handshake, and owns its connection until it is done."""
        self.pending[pending] = None
        pending.event = selectors.EVENT_READ
        try:
            self._selector.register(pending.sock, pending.event, partial(self._serve, pending))
        except BaseException:
            self.drop(pending)
            raise
        self._serve(pending)

    def tick(self) -> None:
        """Drops connections that are too slow; call it regularly."""
        now = time.monotonic()
        for pending in [p for p in self.pending if now >= p.deadline]:
            if pending.ended:
                self.drop(pending)
            else:
                self._fail(pending, TimeoutError("it was silent or too slow"))

    def drop(self, pending: Pending) -> None:
        """Closes a connection at once."""
        del self.pending[pending]
        with contextlib.suppress(KeyError):  # it could not be registered
            self._selector.unregister(pending.sock)
        pending.sock.close()

    def close(self) -> None:
        """Closes all connections."""
        for pending in list(self.pending):
            self.drop(pending)

    def _serve(self, pending: Pending) -> None:
        """Advances a connection that is ready."""
        if pending not in self.pending:
            return None
        if pending.ended:
            try:
                if socket.socket.recv(pending.sock, 4096):
                    return None
            except BlockingIOError:
                return None
            except OSError:
                pass
            return self.drop(pending)
        try:
            result = pending.advance()
        except (OSError, WireError, TlsMismatch, TfdistError) as error:
            self._fail(pending, error)
        except BaseException:
            self._fail(pending, WireError("it caused an unexpected error"))
            raise
        else:
            if isinstance(result, Identity):
                del self.pending[pending]
                self._selector.unregister(pending.sock)
                pending.on_done(result)
            elif result != pending.event:
                pending.event = result
                self._selector.modify(pending.sock, result, partial(self._serve, pending))

    def _fail(self, pending: Pending, error: Exception) -> None:
        # The peer reads the reason, if one was sent, and closes; input that nobody has read would
        # discard it.
        pending.ended = True
        pending.deadline = time.monotonic() + _LINGER_SECONDS
        try:
            socket.socket.shutdown(pending.sock, socket.SHUT_WR)
            pending.event = selectors.EVENT_READ
            self._selector.modify(pending.sock, pending.event, partial(self._serve, pending))
        except OSError:
            self.drop(pending)
        pending.on_failed(error)
