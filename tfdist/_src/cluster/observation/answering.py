"""Answers observers: asks the ranks once for all of them, and sends the answer."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable
from functools import partial

from tfdist._src.cluster.auth.identity import OBSERVE, Identity
from tfdist._src.cluster.net.framing import encode
from tfdist._src.cluster.net.sockets import send_at_once
from tfdist._src.cluster.observation.answer import encode_answer
from tfdist._src.cluster.session.reports import Gathering, Presence
from tfdist._src.cluster.session.session import Session

PATIENCE_SECONDS = 3.0
"""How long the ranks have to answer."""

_SEND_SECONDS = 10.0
MOST = 4
"""How many observers may be answered at the same time."""
_CHUNK = 64 * 1024


class _Reply:
    """An answer on its way to an observer."""

    def __init__(self, sock: socket.socket, frame: bytes) -> None:
        self.sock = sock
        self.deadline = time.monotonic() + _SEND_SECONDS
        self._rest = memoryview(frame)

    def advance(self) -> bool:
        """Sends what can be sent without blocking; returns whether that was the rest."""
        with contextlib.suppress(BlockingIOError):
            while self._rest:
                self._rest = self._rest[self.sock.send(self._rest[:_CHUNK]) :]
        return not self._rest


class Answering:
    """The observers of one period of listening, all served by the thread that calls this.

    An observer sends nothing but its handshake: having proven the secret, it gets an answer, and
    the connection ends. Those that come while the ranks are being asked get the same answer.

    Args:
        selector: where the connections are registered, with a function to call as data.
        session: the session of rank 0.
        wake: ends the wait for the selector, from any thread.
    """

    def __init__(
        self, selector: selectors.BaseSelector, session: Session, wake: Callable[[], object]
    ) -> None:
        self.identity = Identity.of(session.topology, OBSERVE)
        self._selector = selector
        self._session = session
        self._wake = wake
        self._waiting: list[socket.socket] = []
        self._replies: list[_Reply] = []
        self._gathering: Gathering | None = None
        self._own = b""
        self._deadline = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether there are observers that wait for their answer."""
        return bool(self._waiting or self._replies)

    def tick(self) -> None:
        """Goes on with what is due; call it after every wait."""
        now = time.monotonic()
        if self._gathering and (self._gathering.is_complete or now >= self._deadline):
            frame = self._answer(self._gathering.reports)
            self._gathering = None
            waiting, self._waiting = self._waiting, []
            for sock in waiting:
                reply = _Reply(sock, frame)
                self._replies.append(reply)
                self._selector.register(sock, selectors.EVENT_WRITE, partial(self._send, reply))
                self._send(reply)
        for reply in [one for one in self._replies if now >= one.deadline]:
            self._end(reply)

    def close(self) -> None:
        """Closes all connections."""
        for reply in list(self._replies):
            self._end(reply)
        for sock in self._waiting:
            sock.close()

    def admit(self, sock: socket.socket, hello: Identity) -> None:
        """Answers an observer, soon."""
        if len(self._waiting) + len(self._replies) >= MOST:
            send_at_once(sock, encode({"kind": "busy"}))
            sock.close()
            return
        self._waiting.append(sock)
        if self._gathering is None:
            self._deadline = time.monotonic() + PATIENCE_SECONDS
            self._own = self._session.report.encoded()
            self._gathering = self._session.gather(self._wake)

    def _answer(self, reports: dict[int, bytes]) -> bytes:
        session = self._session
        presences = [session.presence(rank) for rank in range(1, session.size)]
        workers = [str(worker) for worker in session.topology.workers]
        return encode_answer(workers, [Presence(0.0), *presences], {0: self._own, **reports})

    def _send(self, reply: _Reply) -> None:
        if reply in self._replies:
            try:
                ended = reply.advance()
            except OSError:  # the observer is gone
                ended = True
            if ended:
                self._end(reply)

    def _end(self, reply: _Reply) -> None:
        self._replies.remove(reply)
        self._selector.unregister(reply.sock)
        reply.sock.close()
