"""Dials other ranks in threads, retrying until they answer correctly."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from tfdist.cluster.auth.handshake import HELLO_SECONDS, handshake
from tfdist.cluster.auth.identity import Identity
from tfdist.cluster.net.descriptors import close_on_fork
from tfdist.cluster.net.framing import WireError
from tfdist.cluster.net.listener import Ports, dial_endpoints
from tfdist.cluster.net.sockets import connect
from tfdist.cluster.net.tls import Tls

_BACK_OFF = (0.05, 1.0)


@dataclass(frozen=True)
class Endpoint:
    """A connection to open.

    Attributes:
        name: what messages call the peer.
        address: the peer's entry in the cluster.
        ports: the ports at which the peer listens.
        hello: the identity of this process.
        screen: inspects the peer's identity, and raises WireError to reject it.
        on_connected: receives the connection.
        on_failed: receives the error of a failed attempt; OSError and WireError are retried, any
            other error is final.
    """

    name: str
    address: str
    ports: Ports
    hello: Identity
    screen: Callable[[Identity], None]
    on_connected: Callable[[socket.socket], None]
    on_failed: Callable[[Exception], None]


class Connector:
    """Opens connections until it is closed.

    Args:
        secret: the job's secret.
        tls: the TLS contexts; None for connections without TLS.
        deadline: the `time.monotonic()` at which to give up.
    """

    def __init__(self, secret: str, tls: Tls | None, deadline: float) -> None:
        self._secret = secret
        self._tls = tls
        self._deadline = deadline
        self._closed = threading.Event()
        self._lock = threading.Lock()  # guards the next one
        self._handshaking: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []

    def start(self, endpoints: list[Endpoint]) -> None:
        """Opens these connections one after the other, concurrently with those of other calls."""
        thread = threading.Thread(target=self._run, args=(endpoints,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Stops all pending attempts."""
        with self._lock:
            self._closed.set()
            for sock in self._handshaking:
                with contextlib.suppress(OSError):  # the peer was faster
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(HELLO_SECONDS)

    def _run(self, endpoints: list[Endpoint]) -> None:
        for endpoint in endpoints:
            pause = _BACK_OFF[0]
            while not self._closed.is_set():
                try:
                    endpoint.on_connected(self._connect(endpoint))
                    break
                except (OSError, WireError) as error:
                    endpoint.on_failed(error)
                except Exception as error:
                    endpoint.on_failed(error)
                    return
                self._closed.wait(pause)
                pause = min(2 * pause, _BACK_OFF[1])

    def _connect(self, endpoint: Endpoint) -> socket.socket:
        sock = connect(dial_endpoints(endpoint.address, endpoint.ports), self._deadline)
        if self._tls:
            sock = self._tls.wrap(sock, dialed=True)
        close_on_fork(sock)
        try:
            with self._lock:
                if self._closed.is_set():
                    raise TimeoutError("it is too late")
                self._handshaking.add(sock)
            deadline = min(self._deadline, time.monotonic() + HELLO_SECONDS)
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
            with self._lock:
                self._handshaking.discard(sock)
                sock.close()
            raise
        with self._lock:
            self._handshaking.discard(sock)
        return sock
