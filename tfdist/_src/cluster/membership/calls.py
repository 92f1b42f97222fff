"""Asks other members: one authenticated connection for each request."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from tfdist._src.cluster.auth.handshake import handshake
from tfdist._src.cluster.auth.identity import REGROUP, Identity
from tfdist._src.cluster.cluster_spec import Topology
from tfdist._src.cluster.net.dns import resolve
from tfdist._src.cluster.net.framing import FRAME_LIMIT, Header, WireError, encode, read_frame
from tfdist._src.cluster.net.sockets import close_on_fork, connect
from tfdist._src.cluster.net.tls import Tls
from tfdist._src.options import Options
from tfdist.errors import ClusterError


class Calls:
    """How this process calls others.

    Args:
        topology: its cluster, of which messages name this process.
        options: `secret` and the TLS options are used.

    Raises:
        TlsError: the certificates are unusable.
    """

    def __init__(self, topology: Topology, options: Options) -> None:
        self._mine = Identity.of(topology, REGROUP)
        self._secret = options.secret
        self._tls = Tls.load(options)

    def ask(self, address: str, header: Header, seconds: float) -> Header:
        """Asks once, and reads one frame.

        Raises:
            OSError: nobody answers there, or not in time.
            WireError: what answers is no worker of a job that can form a new group.
            ClusterError, TlsError: it has another secret, version or certificate.
        """
        call = Call(self, address, header)
        try:
            return call.run(lambda frame: True, seconds)
        finally:
            call.close()

    def dial(self, address: str, deadline: float) -> socket.socket:
        """A connection that nobody has proven anything on yet; raises OSError."""
        sock = connect(resolve(address), deadline)
        return close_on_fork(self._tls.wrap(sock, dialed=True) if self._tls else sock)

    def authenticate(self, sock: socket.socket, address: str, deadline: float) -> None:
        """Proves the secret to each other; raises as `ask` does."""
        admit = self._screen
        handshake(sock, self._mine, self._secret, deadline, first=True, admit=admit, name=address)

    def _screen(self, theirs: Identity) -> None:
        if theirs.purpose != REGROUP:
            raise WireError(f"it is {theirs}, and forms no new groups")
        if theirs.version != self._mine.version:
            raise ClusterError(
                f"The workers run different versions of tfdist: {self._mine.version} at "
                f"{self._mine}; {theirs.version} at {theirs}. Install the same version everywhere."
            )


class Call:
    """One request, whose connection may stay open until something happens.

    Args:
        calls: how to call.
        address: whom.
        header: the request.
    """

    def __init__(self, calls: Calls, address: str, header: Header) -> None:
        self._calls = calls
        self._address = address
        self._header = header
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._closed = False
        self._running = False

    def run(self, is_last: Callable[[Header], bool], seconds: float) -> Header:
        """Calls, and reads frames until the last one.

        Args:
            is_last: whether a frame ends the call; called with each, also to watch them.
            seconds: the longest silence.

        Raises:
            OSError, WireError, ClusterError, TlsError: see `Calls.ask`.
        """
        sock = self._calls.dial(self._address, time.monotonic() + seconds)
        with self._lock:
            self._sock, self._running = sock, True
        try:
            if self._closed:
                raise ConnectionError("the call has been closed")
            self._calls.authenticate(sock, self._address, time.monotonic() + seconds)
            sock.settimeout(seconds)
            sock.sendall(encode(self._header))
            while True:
                header, _ = read_frame(sock, FRAME_LIMIT, time.monotonic() + seconds)
                if is_last(header):
                    return header
        except BaseException:
            sock.close()
            raise
        finally:
            with self._lock:
                self._running = False

    def take(self) -> socket.socket:
        """The connection of a call that has ended; it is no longer closed with the call."""
        with self._lock:
            sock, self._sock = self._sock, None
        assert sock is not None
        return sock

    def close(self) -> None:
        """Ends the call, from any thread: `run` raises OSError soon."""
        with self._lock:
            self._closed = True
            if self._sock is None:
                return
            if not self._running:
                self._sock.close()
                return
            # Another thread reads it, so its number must not be given away.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
