"""A connection that is in the clear at first, and TLS from then on."""

from __future__ import annotations

import errno
import socket
import ssl
import time
from typing import Any


class TlsSocket(ssl.SSLSocket):
    """What a context of `Tls` makes of a connected socket.

    Like a socket in the clear it raises BlockingIOError where it would have to wait, and can be
    shut down for writing alone. One thread at a time may use it.
    """

    _secured = False

    def secure(self, deadline: float) -> None:
        """Begins TLS, at both ends at the same time.

        Args:
            deadline: the `time.monotonic()` at which to give up.

        Raises:
            ssl.SSLError: the two do not trust one another, or do not fit.
            OSError: the connection ended, or the deadline passed.
        """
        seconds = self.gettimeout()
        self.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            self.do_handshake()
        except TimeoutError:
            raise TimeoutError("it was silent or too slow") from None
        self.settimeout(seconds)
        self._secured = True

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Reads what has come; with MSG_PEEK, looks at it as it came over the wire."""
        if not self._secured or flags & socket.MSG_PEEK:
            return socket.socket.recv(self, buflen, flags)
        seconds = self.gettimeout()
        if flags & socket.MSG_DONTWAIT:
            self.settimeout(0)
        try:
            return super().recv(buflen)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError(errno.EAGAIN, "not yet") from None
        finally:
            if seconds != 0:
                self.settimeout(seconds)

    def send(self, data: Any, flags: int = 0) -> int:
        """Sends all or nothing; after BlockingIOError, what comes next begins with the same."""
        if not self._secured:
            return socket.socket.send(self, data, flags)
        seconds = self.gettimeout()
        if flags & socket.MSG_DONTWAIT:
            self.settimeout(0)
        try:
            return super().send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError(errno.EAGAIN, "not yet") from None
        finally:
            if seconds != 0:
                self.settimeout(seconds)

    def shutdown(self, how: int) -> None:
        """Ends a direction of the connection; what comes in the other one is still decrypted."""
        socket.socket.shutdown(self, how)


def in_the_clear(sock: socket.socket) -> socket.socket:
    """The connection without TLS, where both ends have read all that was said under it."""
    return socket.socket(fileno=sock.detach()) if isinstance(sock, TlsSocket) else sock
