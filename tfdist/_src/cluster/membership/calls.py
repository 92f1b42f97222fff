"""Sends requests to other members, each over its own authenticated connection."""

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
    """Calls other members from this process.

    Args:
        topology: the cluster, with the name of this process for messages.
        options: `secret` and the TLS options are used.

    Raises:
        TlsError: the certificates are unusable.
    """

    def __init__(self, topology: Topology, options: Options) -> None:
        self._mine = Identity.of(topology, REGROUP)
        self._secret = options.secret
        self._tls = Tls.load(options)

    def ask(self, address: str, header: Header, seconds: float) -> Header:
        """Sends one request, and reads one frame.

        Raises:
            OSError: no process answers there, or not in time.
            WireError: the peer is not a worker of a job that can form a new group.
            ClusterError, TlsError: the peer has another secret, version or certificate.
        """
        call = Call(self, address, header)
        try:
            return call.run(lambda frame: True, seconds)
        finally:
            call.close()

    def dial(self, address: str, deadline: float) -> socket.socket:
        """Returns a connection, not authenticated yet; raises OSError."""
        sock = connect(resolve(address), deadline)
        return close_on_fork(self._tls.wrap(sock, dialed=True) if self._tls else sock)

    def authenticate(self, sock: socket.socket, address: str, deadline: float) -> None:
        """Authenticates both ends of a connection; raises as `ask` does."""
        admit = self._screen
        handshake(sock, self._mine, self._secret, deadline, first=True, admit=admit, name=address)

    def _screen(self, theirs: Identity) -> None:
        if theirs.purpose != REGROUP:
            raise WireError(f"it is {theirs}, which does not form new groups")
        if theirs.version != self._mine.version:
            raise ClusterError(
                f"The workers run different versions of tfdist: {self._mine.version} at "
                f"{self._mine}; {theirs.version} at {theirs}. Install the same version everywhere."
            )


class Call:
    """One request; its connection may stay open until an event occurs.

    Args:
        calls: makes the call.
        address: the member to call.
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
        """Calls the member, and reads frames until the last one.

        Args:
            is_last: whether a frame ends the call. It is called with each frame, so the caller can
                also use it to watch the frames.
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
        """Takes the connection of a call that has ended; `close` no longer closes it."""
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
            # Another thread reads the socket, so its descriptor must not be freed for reuse.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
