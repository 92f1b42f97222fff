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
    """Sends requests to other members, and authenticates both ends of each connection.

    Args:
        topology: the cluster. This process identifies itself with its entry in the cluster.
        options: the job's options. Only `secret` and the TLS options are used.

    Raises:
        TlsError: the certificates are unusable.
    """

    def __init__(self, topology: Topology, options: Options) -> None:
        self._mine = Identity.of(topology, REGROUP)
        self._secret = options.secret
        self._tls = Tls.load(options)

    def ask(self, address: str, header: Header, seconds: float) -> Header:
        """Sends a request to a member, and returns the header of the first frame of its answer.

        Args:
            address: the `"host:port"` of the member.
            header: the request.
            seconds: how long to wait for the connection, and for the answer.

        Raises:
            OSError: no process listens at the address, or the process does not answer in time.
            WireError: the process at the address does not belong to a job that can form new groups.
            ClusterError, TlsError: the process at the address has a different secret or a different
                version of tfdist, or the two ends do not trust each other's certificates.
        """
        call = Call(self, address, header)
        try:
            return call.run(lambda frame: True, seconds)
        finally:
            call.close()

    def dial(self, address: str, deadline: float) -> socket.socket:
        """Connects to an address, without authentication; raises OSError if that fails."""
        sock = connect(resolve(address), deadline)
        return close_on_fork(self._tls.wrap(sock, dialed=True) if self._tls else sock)

    def authenticate(self, sock: socket.socket, address: str, deadline: float) -> None:
        """Authenticates both ends of a connection; raises the same errors as `ask`."""
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
    """One request to a member. The connection stays open until the member has answered.

    Args:
        calls: opens and authenticates the connection.
        address: the `"host:port"` of the member.
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
        """Sends the request, reads frames until the last one, and returns the header of that frame.

        Args:
            is_last: called with the header of each frame; returns whether the frame is the last
                one. The caller can also use this function to observe the other frames.
            seconds: how long to wait for the connection, and for each frame.

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
        """Returns the connection of a completed call; the caller must close the connection."""
        with self._lock:
            sock, self._sock = self._sock, None
        assert sock is not None
        return sock

    def close(self) -> None:
        """Ends the call. This can be called in any thread; `run` then raises OSError."""
        with self._lock:
            self._closed = True
            if self._sock is None:
                return
            if not self._running:
                self._sock.close()
                return
            # Another thread still reads the socket. If this thread closed it, the system could give
            # the same descriptor to another file.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
