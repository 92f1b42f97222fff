"""Accepts connections, and performs the handshake of each in a separate thread."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from tfdist.cluster.auth.handshake import HELLO_SECONDS, handshake
from tfdist.cluster.auth.identity import Identity
from tfdist.cluster.net.descriptors import close_on_fork
from tfdist.cluster.net.framing import WireError
from tfdist.cluster.net.sockets import tune
from tfdist.cluster.net.tls import Tls
from tfdist.cluster.net.wait_messages import Announce

_MAX_STRANGERS = 256
_PAUSE = 0.01


class Acceptor:
    """Authenticates incoming connections; silent or slow strangers delay no one else.

    Args:
        mine: the identity of this process.
        secret: the job's secret.
        tls: the TLS contexts; None for connections without TLS.
        expected: how many workers may connect at the same time; strangers get extra room.
        screen: inspects the identity of an authenticated peer, and raises WireError to reject it.
        on_accepted: receives a connection once the peer knows that it is accepted. Like `screen` it
            is called from the connection's thread.
        announce: called with a line for each rejected connection.
    """

    def __init__(
        self,
        mine: Identity,
        secret: str,
        tls: Tls | None,
        expected: int,
        screen: Callable[[Identity], None],
        on_accepted: Callable[[socket.socket, Identity], None],
        announce: Announce,
    ) -> None:
        self._mine = mine
        self._secret = secret
        self._tls = tls
        self._max_threads = _MAX_STRANGERS + expected
        self._screen = screen
        self._on_accepted = on_accepted
        self._announce = announce
        self._lock = threading.Lock()  # guards the next three
        self._unauthenticated: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._closed = False

    def accept(self, listener: socket.socket) -> None:
        """Accepts the next connection of a non-blocking listener."""
        try:
            sock, peer = listener.accept()
            if self._tls:
                sock = self._tls.wrap(sock, dialed=False)
        except OSError:  # the peer is gone, or no descriptors are left for now
            time.sleep(_PAUSE)
            return
        close_on_fork(sock)
        name = f"{peer[0]}:{peer[1]}"
        thread = threading.Thread(target=self._handshake, args=(sock, name), daemon=True)
        with self._lock:
            if self._closed or len(self._threads) >= self._max_threads:
                sock.close()
                return
            self._unauthenticated.add(sock)
            self._threads.add(thread)
        thread.start()

    def close(self) -> None:
        """Drops unauthenticated connections; the handshakes of the others complete."""
        with self._lock:
            self._closed = True
            for sock in self._unauthenticated:
                with contextlib.suppress(OSError):  # the peer was faster
                    sock.shutdown(socket.SHUT_RDWR)
            threads = list(self._threads)
        for thread in threads:
            thread.join(HELLO_SECONDS)

    def _handshake(self, sock: socket.socket, peer: str) -> None:
        try:
            try:
                sock.settimeout(HELLO_SECONDS)
                tune(sock)
                deadline = time.monotonic() + HELLO_SECONDS
                hello = handshake(
                    sock,
                    self._mine,
                    self._secret,
                    deadline,
                    first=False,
                    admit=lambda hello: self._admit(sock, hello),
                )
            except (OSError, WireError) as error:
                self._drop(sock, peer, error)
            except BaseException:
                self._drop(sock, peer, WireError("it caused an unexpected error"))
                raise
            else:
                self._on_accepted(sock, hello)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _admit(self, sock: socket.socket, hello: Identity) -> None:
        self._screen(hello)
        with self._lock:
            if self._closed:
                raise WireError("it connected too late")
            self._unauthenticated.discard(sock)

    def _drop(self, sock: socket.socket, peer: str, error: Exception) -> None:
        with self._lock:
            self._unauthenticated.discard(sock)
            sock.close()
            closed = self._closed
        if not closed:
            self._announce(f"tfdist: dropped a connection from {peer}: {error}")
