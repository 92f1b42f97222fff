"""Dials other ranks in threads, again and again until they answer as they should."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from tfdist.cluster.auth.handshake import HELLO_SECONDS, handshake
from tfdist.cluster.auth.identity import Identity
from tfdist.cluster.net.descriptors import not_for_children
from tfdist.cluster.net.framing import WireError
from tfdist.cluster.net.listener import Ports, places
from tfdist.cluster.net.sockets import connect
from tfdist.cluster.net.tls import Tls

_BACK_OFF = (0.05, 1.0)


@dataclass(frozen=True)
class Endpoint:
    """One connection to make.

    Attributes:
        name: what messages call the other.
        address: the other's entry in the cluster.
        ports: where the other listens.
        hello: what this process says of itself.
        screen: looks at the other's hello, and raises WireError to refuse it.
        made: takes the connection.
        failed: takes why an attempt failed: OSError or WireError, after which comes another one,
            or any other error, after which comes none.
    """

    name: str
    address: str
    ports: Ports
    hello: Identity
    screen: Callable[[Identity], None]
    made: Callable[[socket.socket], None]
    failed: Callable[[Exception], None]


class Connector:
    """Makes connections until it is closed.

    Args:
        secret: the job's secret.
        tls: for connections with TLS; None for those in the clear.
        deadline: the `time.monotonic()` at which to give up.
    """

    def __init__(self, secret: str, tls: Tls | None, deadline: float) -> None:
        self._secret = secret
        self._tls = tls
        self._deadline = deadline
        self._over = threading.Event()
        self._lock = threading.Lock()  # guards what follows
        self._talking: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []

    def start(self, calls: list[Endpoint]) -> None:
        """Makes these connections one after the other, beside all others."""
        thread = threading.Thread(target=self._run, args=(calls,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Ends all attempts that still go on."""
        with self._lock:
            self._over.set()
            for sock in self._talking:
                with contextlib.suppress(OSError):  # the other was faster
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(HELLO_SECONDS)

    def _run(self, calls: list[Endpoint]) -> None:
        for call in calls:
            pause = _BACK_OFF[0]
            while not self._over.is_set():
                try:
                    call.made(self._reach(call))
                    break
                except (OSError, WireError) as error:
                    call.failed(error)
                except Exception as error:
                    call.failed(error)
                    return
                self._over.wait(pause)
                pause = min(2 * pause, _BACK_OFF[1])

    def _reach(self, call: Endpoint) -> socket.socket:
        sock = connect(places(call.address, call.ports), self._deadline)
        if self._tls:
            sock = self._tls.wrap(sock, dialled=True)
        not_for_children(sock)
        try:
            with self._lock:
                if self._over.is_set():
                    raise TimeoutError("it is too late")
                self._talking.add(sock)
            deadline = min(self._deadline, time.monotonic() + HELLO_SECONDS)
            handshake(
                sock,
                call.hello,
                self._secret,
                deadline,
                first=True,
                admit=call.screen,
                name=call.name,
            )
        except BaseException:
            with self._lock:
                self._talking.discard(sock)
                sock.close()
            raise
        with self._lock:
            self._talking.discard(sock)
        return sock
