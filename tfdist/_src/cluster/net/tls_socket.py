"""A connection that starts in the clear and switches to TLS."""

from __future__ import annotations

import errno
import hashlib
import selectors
import socket
import ssl
import time
from typing import Any


class TlsSocket(ssl.SSLSocket):
    """A connected socket wrapped by a context of `Tls`.

    Like a plain socket it raises BlockingIOError when it would block, and can be shut down for
    writing only. It is not thread-safe.
    """

    own_certificate = b""
    """The certificate of this end, DER."""
    _secured = False

    def secure(self, deadline: float) -> None:
        """Performs the TLS handshake; both ends call this at the same time.

        Args:
            deadline: the `time.monotonic()` at which to give up.

        Raises:
            ssl.SSLError: the two do not trust each other, or are incompatible.
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

    def begin(self) -> int | None:
        """Advances the TLS handshake of a non-blocking socket.

        Returns:
            The `selectors` event to wait for before calling this again; None once it is complete.

        Raises:
            ssl.SSLError: the two do not trust each other, or are incompatible.
            OSError: the connection ended.
        """
        try:
            self.do_handshake()
        except ssl.SSLWantReadError:
            return selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            return selectors.EVENT_WRITE
        self._secured = True
        return None

    def certificate_digests(self) -> bytes:
        """SHA-256 of this end's certificate, and of the peer's; 64 bytes."""
        both = (self.own_certificate, self.getpeercert(binary_form=True) or b"")
        return b"".join(hashlib.sha256(one).digest() for one in both)

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Reads decrypted data; with MSG_PEEK, peeks at the raw data received."""
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
        """Sends all or nothing; after BlockingIOError, the same data must be sent again."""
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
        """Shuts down one direction; data arriving in the other is still decrypted."""
        socket.socket.shutdown(self, how)


def in_the_clear(sock: socket.socket) -> socket.socket:
    """Removes TLS from a connection, once both ends have read everything sent in it."""
    return socket.socket(fileno=sock.detach()) if isinstance(sock, TlsSocket) else sock
