"""Dials other ranks in a few threads, retrying until they answer correctly."""

from __future__ import annotations

import contextlib
import heapq
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tfdist.cluster.auth.handshake import HELLO_SECONDS, handshake
from tfdist.cluster.auth.identity import Identity
from tfdist.cluster.net.descriptors import close_on_fork
from tfdist.cluster.net.framing import WireError
from tfdist.cluster.net.listener import Ports, dial_endpoints
from tfdist.cluster.net.sockets import connect
from tfdist.cluster.net.tls import Tls

_BACK_OFF = (0.05, 1.0)
_MAX_THREADS = 8
_HANDSHAKE_SECONDS = 30.0


@dataclass(frozen=True)
class Endpoint:
    """A connection to open.

    Attributes:
        name: what messages call the peer.
        address: the peer's entry in the cluster.
        ports: the ports at which the peer listens; None for that of the address.
        hello: the identity of this process.
        screen: inspects the peer's identity, and raises WireError to reject it.
        on_connected: receives the connection.
        on_failed: receives the error of a failed attempt; OSError and WireError are retried, any
            other error is final.
    """

    name: str
    address: str
    ports: Ports | None
    hello: Identity
    screen: Callable[[Identity], None]
    on_connected: Callable[[socket.socket], None]
    on_failed: Callable[[Exception], None]


class Connector:
    """Opens connections in a few threads until it is closed.

    Args:
        secret: the job's secret.
        tls: the TLS contexts; None for connections without TLS.
        deadline: the `time.monotonic()` at which to give up.
    """

    def __init__(self, secret: str, tls: Tls | None, deadline: float) -> None:
        self._secret = secret
        self._tls = tls
        self._deadline = deadline
        self._changed = threading.Condition()  # guards the next four
        self._closed = False
        self._handshaking: set[socket.socket] = set()
        self._due: list[tuple[float, int, float, Endpoint]] = []  # when, number, next pause
        self._unfinished = 0
        self._threads: list[threading.Thread] = []

    def start(self, endpoints: Sequence[Endpoint]) -> None:
        """Opens these connections in any order; called once."""
        now = time.monotonic()
        self._due = [(now, i, _BACK_OFF[0], endpoint) for i, endpoint in enumerate(endpoints)]
        self._unfinished = len(endpoints)
        for _ in range(min(_MAX_THREADS, len(endpoints))):
            thread = threading.Thread(target=self._run, daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Stops all pending attempts."""
        with self._changed:
            self._closed = True
            for sock in self._handshaking:
                with contextlib.suppress(OSError):  # the peer was faster
                    sock.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(HELLO_SECONDS)

    def _run(self) -> None:
        while (attempt := self._next()) is not None:
            _, number, pause, endpoint = attempt
            retry = False
            again = replace(
                endpoint, hello=replace(endpoint.hello, attempt=endpoint.hello.attempt + 1)
            )
            try:
                endpoint.on_connected(self._connect(endpoint))
            except (OSError, WireError) as error:
                endpoint.on_failed(error)
                retry = True
            except Exception as error:
                endpoint.on_failed(error)
            with self._changed:
                if retry:
                    later = time.monotonic() + pause
                    longer = min(2 * pause, _BACK_OFF[1])
                    heapq.heappush(self._due, (later, number, longer, again))
                else:
                    self._unfinished -= 1
                self._changed.notify()
                if not self._unfinished:
                    self._changed.notify_all()

    def _next(self) -> tuple[float, int, float, Endpoint] | None:
        """Waits for the next attempt; None once there is none left."""
        with self._changed:
            while not self._closed and self._unfinished:
                wait = self._due[0][0] - time.monotonic() if self._due else None
                if wait is not None and wait <= 0:
                    return heapq.heappop(self._due)
                self._changed.wait(wait)
            return None

    def _connect(self, endpoint: Endpoint) -> socket.socket:
        sock = connect(dial_endpoints(endpoint.address, endpoint.ports), self._deadline)
        if self._tls:
            sock = self._tls.wrap(sock, dialed=True)
        close_on_fork(sock)
        try:
            with self._changed:
                if self._closed:
                    raise TimeoutError("it is too late")
                self._handshaking.add(sock)
            # The peer may have hundreds of connections to accept at the same time.
            deadline = min(self._deadline, time.monotonic() + _HANDSHAKE_SECONDS)
            handshake(
                sock,
                endpoint.hello,
                self._secret,
                deadline,
                first=True,
                admit=endpoint.screen,
                name=endpoint.name,
            )
        except BaseException:
            with self._changed:
                self._handshaking.discard(sock)
                sock.close()
            raise
        with self._changed:
            self._handshaking.discard(sock)
        return sock
