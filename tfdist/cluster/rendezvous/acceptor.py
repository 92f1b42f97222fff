"""Receives those who dial this process: greets each in a thread of its own."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from tfdist.cluster.auth.handshake import HELLO_SECONDS, handshake
from tfdist.cluster.auth.identity import Identity
from tfdist.cluster.net.descriptors import not_for_children
from tfdist.cluster.net.framing import WireError
from tfdist.cluster.net.sockets import tune
from tfdist.cluster.net.tls import Tls
from tfdist.cluster.net.wait_messages import Announce

_STRANGERS = 256
_PAUSE = 0.01


class Acceptor:
    """Learns who the newcomers are; a silent or slow stranger holds up nobody.

    Args:
        mine: what this process says of itself.
        secret: the job's secret.
        tls: for connections with TLS; None for those in the clear.
        expected: how many may well come at one time; there is room for some strangers besides.
        screen: looks at a newcomer that has proven itself, and raises WireError to refuse it.
        welcome: takes a newcomer that was told that it is accepted. Like `screen` it is called
            from the newcomer's thread.
        announce: takes a line on each one that was refused.
    """

    def __init__(
        self,
        mine: Identity,
        secret: str,
        tls: Tls | None,
        expected: int,
        screen: Callable[[Identity], None],
        welcome: Callable[[socket.socket, Identity], None],
        announce: Announce,
    ) -> None:
        self._mine = mine
        self._secret = secret
        self._tls = tls
        self._most = _STRANGERS + expected
        self._screen = screen
        self._welcome = welcome
        self._announce = announce
        self._lock = threading.Lock()  # guards the next three
        self._unproven: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._over = False

    def accept(self, listener: socket.socket) -> None:
        """Takes the next connection; the listener does not block."""
        try:
            sock, peer = listener.accept()
            if self._tls:
                sock = self._tls.wrap(sock, dialled=False)
        except OSError:  # it has gone again, or descriptors are used up for now
            time.sleep(_PAUSE)
            return
        not_for_children(sock)
        name = f"{peer[0]}:{peer[1]}"
        thread = threading.Thread(target=self._greet, args=(sock, name), daemon=True)
        with self._lock:
            if self._over or len(self._threads) >= self._most:
                sock.close()
                return
            self._unproven.add(sock)
            self._threads.add(thread)
        thread.start()

    def close(self) -> None:
        """Turns away those that have not proven themselves; the others are welcomed still."""
        with self._lock:
            self._over = True
            for sock in self._unproven:
                with contextlib.suppress(OSError):  # the newcomer was faster
                    sock.shutdown(socket.SHUT_RDWR)
            threads = list(self._threads)
        for thread in threads:
            thread.join(HELLO_SECONDS)

    def _greet(self, sock: socket.socket, peer: str) -> None:
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
                self._drop(sock, peer, WireError("it upset this process"))
                raise
            else:
                self._welcome(sock, hello)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _admit(self, sock: socket.socket, hello: Identity) -> None:
        self._screen(hello)
        with self._lock:
            if self._over:
                raise WireError("it came too late")
            self._unproven.discard(sock)

    def _drop(self, sock: socket.socket, peer: str, error: Exception) -> None:
        with self._lock:
            self._unproven.discard(sock)
            sock.close()
            over = self._over
        if not over:
            self._announce(f"tfdist: dropped a connection from {peer}: {error}")
