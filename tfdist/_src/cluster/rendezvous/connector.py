"""Connects to other ranks in the calling thread, and retries until they accept the connection."""

from __future__ import annotations

import contextlib
import errno
import heapq
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tfdist._src.cluster.auth.handshake import dialer_error, dialing
from tfdist._src.cluster.auth.identity import Identity
from tfdist._src.cluster.cluster_spec import split
from tfdist._src.cluster.net import sockets
from tfdist._src.cluster.net.dns import Endpoint, is_numeric
from tfdist._src.cluster.net.framing import WireError
from tfdist._src.cluster.net.listener import Ports, dial_endpoints
from tfdist._src.cluster.net.tls import Tls
from tfdist._src.cluster.rendezvous.acceptor import Handshakes, PendingHandshake

_BACK_OFF = (0.05, 1.0)
_MAX_AT_ONCE = 16
_MAX_CONNECTING = 256
_FAST_SECONDS = 0.25
"""A connection attempt that takes longer no longer counts toward `_MAX_AT_ONCE`."""
_HANDSHAKE_SECONDS = 30.0
"""The time limit of a handshake; the peer may have hundreds of connections to accept."""


@dataclass(frozen=True)
class Target:
    """A connection that a `Connector` opens.

    Attributes:
        name: the name of the peer in messages.
        address: the `"host:port"` of the peer in the cluster.
        ports: the ports at which the peer listens. None if the peer listens at the port of its
            address.
        hello: the identity that this process sends to the peer.
        screen: called with the identity of the peer; raises WireError to reject the peer.
        on_opened: called when the peer has accepted a connection, before the handshake.
        on_connected: called with the non-blocking connection after the handshake.
        on_failed: called with the error of each failed attempt. After an OSError or a WireError,
            there is another attempt. Any other error is final.
    """

    name: str
    address: str
    ports: Ports | None
    hello: Identity
    screen: Callable[[Identity], None]
    on_opened: Callable[[], None]
    on_connected: Callable[[socket.socket], None]
    on_failed: Callable[[Exception], None]


_Name = tuple[str, str]
_Answer = list[Endpoint] | Exception


class _Attempt:
    """An attempt to open a connection.

    Args:
        number: the number of the target. It determines the order of attempts that are due at the
            same time.
        target: the connection to open.
        pause: the number of seconds until the next attempt if this one fails.
    """

    def __init__(self, number: int, target: Target, pause: float = _BACK_OFF[0]) -> None:
        self.number = number
        self.target = target
        self.pause = pause
        self.endpoints: list[Endpoint] = []  # the endpoints that have not been tried yet
        self.begun = 0.0  # the time at which connecting to the current endpoint began

    def next(self) -> _Attempt:
        """Returns the next attempt to open the same connection, with a longer pause."""
        hello = replace(self.target.hello, attempt=self.target.hello.attempt + 1)
        pause = min(2 * self.pause, _BACK_OFF[1])
        return _Attempt(self.number, replace(self.target, hello=hello), pause)


class Connector:
    """Opens connections in the caller's thread, and retries failed attempts until it is closed.

    Only host names are resolved in other threads.

    Args:
        selector: the selector of the calling thread. The data of each registered connection is the
            function to call when the connection is ready.
        secret: the job's secret.
        tls: the TLS contexts; None if the job does not use TLS.
        wake: called in another thread when a host name has been resolved. The caller's thread must
            then call `begin_due`.
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
        self._looked_up: dict[_Name, list[_Attempt]] = {}
        self._resolved: queue.SimpleQueue[tuple[_Name, _Answer]] = queue.SimpleQueue()
        self._connecting: dict[_Attempt, socket.socket] = {}
        self._handshakes = Handshakes(selector)

    def start(self, targets: Sequence[Target]) -> None:
        """Sets the connections that `begin_due` opens."""
        now = time.monotonic()
        self._due = [(now, number, _Attempt(number, one)) for number, one in enumerate(targets)]

    def begin_due(self) -> None:
        """Starts the attempts that are due; must be called before every wait."""
        while not self._resolved.empty():
            name, answer = self._resolved.get()
            for attempt in self._looked_up.pop(name):
                self._on_resolved(attempt, answer)
        while self._due and self._due[0][0] <= time.monotonic() and self._has_room():
            self._begin(heapq.heappop(self._due)[2])

    def seconds_left(self, most: float) -> float:
        """Returns the number of seconds until the next attempt is due, but at most `most`."""
        if not self._due or not self._has_room():
            return most
        return min(most, max(0.0, self._due[0][0] - time.monotonic()))

    def tick(self) -> None:
        """Gives up attempts that are too slow; must be called regularly."""
        now = time.monotonic()
        for attempt in [
            one for one in self._connecting if now - one.begun >= sockets.CONNECT_SECONDS
        ]:
            self._close(attempt)
            self._connect(attempt, TimeoutError(errno.ETIMEDOUT, "timed out"))
        self._handshakes.tick()

    def close(self) -> None:
        """Gives up all attempts."""
        self._due.clear()
        for attempt in list(self._connecting):
            self._close(attempt)
        self._handshakes.close()

    def _has_room(self) -> bool:
        """Whether another attempt may start now, without too many attempts at the same time."""
        if len(self._connecting) >= _MAX_CONNECTING:
            return False
        slow = time.monotonic() - _FAST_SECONDS
        busy = len(self._looked_up) + len(self._handshakes.pending)
        for attempt in reversed(self._connecting):  # latest first
            if busy >= _MAX_AT_ONCE or attempt.begun <= slow:
                break
            busy += 1
        return busy < _MAX_AT_ONCE

    def _begin(self, attempt: _Attempt) -> None:
        name = (attempt.target.address, str(attempt.target.ports))
        if is_numeric(split(attempt.target.address)[0]):
            self._on_resolved(attempt, _look_up(attempt.target))
        elif name in self._looked_up:
            self._looked_up[name].append(attempt)
        else:
            self._looked_up[name] = [attempt]
            resolve = partial(self._resolve, name, attempt.target)
            threading.Thread(target=resolve, name="tfdist-resolve", daemon=True).start()

    def _resolve(self, name: _Name, target: Target) -> None:
        self._resolved.put((name, _look_up(target)))
        self._wake()

    def _on_resolved(self, attempt: _Attempt, answer: _Answer) -> None:
        if isinstance(answer, Exception):
            self._failed(attempt, answer)
        else:
            attempt.endpoints = list(answer)
            self._connect(attempt, OSError("no address"))

    def _connect(self, attempt: _Attempt, failure: OSError) -> None:
        """Starts to connect to the next endpoint; the attempt fails if there are no more."""
        while attempt.endpoints:
            try:
                sock = sockets.close_on_fork(sockets.begin_connect(attempt.endpoints.pop(0)))
            except OSError as error:
                failure = error
                continue
            attempt.begun = time.monotonic()
            self._connecting[attempt] = sock
            self._selector.register(sock, selectors.EVENT_WRITE, partial(self._opened, attempt))
            return
        self._failed(attempt, failure)

    def _opened(self, attempt: _Attempt) -> None:
        """Starts the handshake if connecting has succeeded; otherwise tries the next endpoint."""
        sock = self._connecting.pop(attempt)
        self._selector.unregister(sock)
        target = attempt.target
        try:
            sockets.finish_connect(sock)
            if self._tls:
                sock = sockets.close_on_fork(self._tls.wrap(sock, dialed=True))
        except OSError as error:
            sock.close()
            self._connect(attempt, error)
            return

        def done(_: Identity) -> None:
            target.on_connected(sock)

        def failed(error: Exception) -> None:
            self._failed(attempt, dialer_error(error, target.hello, target.name))

        steps = dialing(
            target.hello, self._secret, self._tls is not None, target.name, target.screen
        )
        target.on_opened()
        deadline = time.monotonic() + _HANDSHAKE_SECONDS
        self._handshakes.begin(
            PendingHandshake(sock, target.address, steps, deadline, done, failed)
        )

    def _failed(self, attempt: _Attempt, error: Exception) -> None:
        attempt.target.on_failed(error)
        if isinstance(error, (OSError, WireError)):
            due = time.monotonic() + attempt.pause
            heapq.heappush(self._due, (due, attempt.number, attempt.next()))

    def _close(self, attempt: _Attempt) -> None:
        sock = self._connecting.pop(attempt)
        with contextlib.suppress(KeyError):  # not registered
            self._selector.unregister(sock)
        sock.close()


def _look_up(target: Target) -> _Answer:
    try:
        return dial_endpoints(target.address, target.ports)
    except Exception as error:
        return error
