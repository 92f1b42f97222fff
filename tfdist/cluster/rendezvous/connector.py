"""Dials other ranks, all in the thread that calls it, retrying until they answer correctly."""

from __future__ import annotations

import heapq
import queue
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from tfdist.cluster.auth.handshake import dialer_error, dialing
from tfdist.cluster.auth.identity import Identity
from tfdist.cluster.net.descriptors import close_on_fork
from tfdist.cluster.net.dns import Endpoint, is_numeric
from tfdist.cluster.net.framing import WireError
from tfdist.cluster.net.listener import Ports, dial_endpoints
from tfdist.cluster.net.sockets import CONNECT_SECONDS, begin_connect, finish_connect
from tfdist.cluster.net.tls import Tls
from tfdist.cluster.rendezvous.handshakes import Handshakes, Pending
from tfdist.cluster.spec.host_port import split

_BACK_OFF = (0.05, 1.0)
_MAX_AT_ONCE = 16
_MAX_LOOKUPS = 4
_HANDSHAKE_SECONDS = 30.0
"""How long a handshake may take; the peer may have hundreds of connections to accept."""


@dataclass(frozen=True)
class Target:
    """A connection to open.

    Attributes:
        name: what messages call the peer.
        address: the peer's entry in the cluster.
        ports: the ports at which the peer listens; None for that of the address.
        hello: the identity of this process.
        screen: inspects the peer's identity, and raises WireError to reject it.
        on_connected: receives the connection, non-blocking.
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


class _Attempt:
    """An attempt to open a connection.

    Args:
        number: that of the target, to tell attempts apart that are due at the same time.
        target: what to connect to.
        pause: seconds until the next attempt, should this one fail.
    """

    def __init__(self, number: int, target: Target, pause: float = _BACK_OFF[0]) -> None:
        self.number = number
        self.target = target
        self.pause = pause
        self.endpoints: list[Endpoint] = []  # still to try
        self.deadline = 0.0  # of the connection to one of them

    def next(self) -> _Attempt:
        """The attempt after this one."""
        hello = replace(self.target.hello, attempt=self.target.hello.attempt + 1)
        pause = min(2 * self.pause, _BACK_OFF[1])
        return _Attempt(self.number, replace(self.target, hello=hello), pause)


class Connector:
    """Opens connections until it is closed.

    Only host names are looked up in threads of their own.

    Args:
        selector: where the connections are registered, with a function to call as data.
        secret: the job's secret.
        tls: the TLS contexts; None for connections without TLS.
        wake: called in another thread to have `begin_due` called soon.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        secret: str,
        tls: Tls | None,
        wake: Callable[[], None],
    ) -> None:
        self._selector = selector
        self._secret = secret
        self._tls = tls
        self._wake = wake
        self._due: list[tuple[float, int, _Attempt]] = []
        self._running = 0
        self._lookups: ThreadPoolExecutor | None = None
        self._resolved: queue.SimpleQueue[tuple[_Attempt, Future[list[Endpoint]]]]
        self._resolved = queue.SimpleQueue()
        self._connecting: dict[_Attempt, socket.socket] = {}
        self._handshakes = Handshakes(selector)

    def start(self, targets: Sequence[Target]) -> None:
        """Lets `begin_due` open these connections, in any order."""
        now = time.monotonic()
        self._due = [(now, number, _Attempt(number, one)) for number, one in enumerate(targets)]

    def begin_due(self) -> None:
        """Begins the attempts that are due; call it before every wait."""
        while not self._resolved.empty():
            self._look_at(*self._resolved.get())
        while self._due and self._running < _MAX_AT_ONCE:
            if self._due[0][0] > time.monotonic():
                break
            self._begin(heapq.heappop(self._due)[2])

    def seconds_left(self, most: float) -> float:
        """Seconds until an attempt is due, or `most`."""
        if not self._due or self._running >= _MAX_AT_ONCE:
            return most
        return min(most, max(0.0, self._due[0][0] - time.monotonic()))

    def tick(self) -> None:
        """Gives up the attempts that are too slow; call it regularly."""
        now = time.monotonic()
        for attempt in [one for one in self._connecting if now >= one.deadline]:
            self._close(attempt)
            self._connect(attempt, TimeoutError("timed out"))
        self._handshakes.tick()

    def close(self) -> None:
        """Stops all pending attempts."""
        self._due.clear()
        for attempt in list(self._connecting):
            self._close(attempt)
        self._handshakes.close()
        if self._lookups:
            self._lookups.shutdown(wait=False, cancel_futures=True)

    def _begin(self, attempt: _Attempt) -> None:
        self._running += 1
        look_up = partial(dial_endpoints, attempt.target.address, attempt.target.ports)
        found: Future[list[Endpoint]]
        if is_numeric(split(attempt.target.address)[0]):
            found = Future()
            try:
                found.set_result(look_up())
            except OSError as error:
                found.set_exception(error)
            self._look_at(attempt, found)
            return
        if self._lookups is None:
            self._lookups = ThreadPoolExecutor(_MAX_LOOKUPS, "tfdist-resolve")

        def resolved(found: Future[list[Endpoint]]) -> None:
            if not found.cancelled():
                self._resolved.put((attempt, found))
                self._wake()

        self._lookups.submit(look_up).add_done_callback(resolved)

    def _look_at(self, attempt: _Attempt, found: Future[list[Endpoint]]) -> None:
        if isinstance(error := found.exception(), Exception):
            self._failed(attempt, error)
        else:
            attempt.endpoints = list(found.result())
            self._connect(attempt, OSError("no address"))

    def _connect(self, attempt: _Attempt, failure: OSError) -> None:
        """Connects to the next endpoint; without one, the attempt has failed."""
        while attempt.endpoints:
            try:
                sock = close_on_fork(begin_connect(attempt.endpoints.pop(0)))
            except OSError as error:
                failure = error
                continue
            attempt.deadline = time.monotonic() + CONNECT_SECONDS
            self._connecting[attempt] = sock
            self._selector.register(sock, selectors.EVENT_WRITE, partial(self._opened, attempt))
            return
        self._failed(attempt, failure)

    def _opened(self, attempt: _Attempt) -> None:
        """Begins the handshake on a connection, or tries the next endpoint."""
        sock = self._connecting.pop(attempt, None)
        if sock is None:  # it was too slow
            return
        self._selector.unregister(sock)
        target = attempt.target
        try:
            finish_connect(sock)
            if self._tls:
                sock = close_on_fork(self._tls.wrap(sock, dialed=True))
        except OSError as error:
            sock.close()
            self._connect(attempt, error)
            return

        def done(_: Identity) -> None:
            self._running -= 1
            target.on_connected(sock)

        def failed(error: Exception) -> None:
            self._failed(attempt, dialer_error(error, target.hello, target.name))

        steps = dialing(
            target.hello, self._secret, self._tls is not None, target.name, target.screen
        )
        deadline = time.monotonic() + _HANDSHAKE_SECONDS
        self._handshakes.begin(Pending(sock, target.address, steps, deadline, done, failed))

    def _failed(self, attempt: _Attempt, error: Exception) -> None:
        self._running -= 1
        attempt.target.on_failed(error)
        if isinstance(error, (OSError, WireError)):
            due = time.monotonic() + attempt.pause
            heapq.heappush(self._due, (due, attempt.number, attempt.next()))

    def _close(self, attempt: _Attempt) -> None:
        sock = self._connecting.pop(attempt)
        self._selector.unregister(sock)
        sock.close()
