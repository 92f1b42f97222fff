"""Opens, configures and closes control connections."""

import contextlib
import errno
import os
import resource
import select
import socket
import time
import weakref
from collections.abc import Sequence
from typing import Protocol, TypeVar

from tfdist._src.cluster.net.dns import Endpoint

_SPARE = 256
"""Descriptors left for other uses, such as the program's files."""


class HasDescriptor(Protocol):
    """Anything that owns a descriptor, like a socket."""

    def fileno(self) -> int: ...

    def detach(self) -> int: ...

    def close(self) -> None: ...


class Descriptor:
    """Owns a descriptor that is not a socket.

    Args:
        number: an open descriptor; -1 for none.
    """

    def __init__(self, number: int) -> None:
        self._number = number

    def fileno(self) -> int:
        """The descriptor; -1 once it is closed or detached."""
        return self._number

    def detach(self) -> int:
        """Releases the descriptor without closing it."""
        number, self._number = self._number, -1
        return number

    def close(self) -> None:
        """Closes the descriptor; calling this again has no effect."""
        if (number := self.detach()) >= 0:
            os.close(number)


def allow_descriptors(count: int) -> None:
    """Raises the soft limit of open descriptors if `count` more descriptors require it.

    Raises:
        OSError: the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + count + _SPARE
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise OSError(
            errno.EMFILE,
            f"this process needs {needed} descriptors, but its hard limit is {hard}: raise it with "
            f"`ulimit -Hn` or LimitNOFILE=",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


_T = TypeVar("_T", bound=HasDescriptor)
_owners: weakref.WeakSet[HasDescriptor] = weakref.WeakSet()


def close_on_fork(owner: _T) -> _T:
    """Closes a descriptor in every child forked while Python owns it.

    A child's copy would keep the connection open after this process has died.

    Args:
        owner: the owner of the descriptor.

    Returns:
        The owner.
    """
    _owners.add(owner)
    return owner


def _after_fork() -> None:
    for owner in list(_owners):
        with contextlib.suppress(OSError):  # the native core has already closed it
            owner.close()


os.register_at_fork(after_in_child=_after_fork)


CONNECT_SECONDS = 3.0
"""The time limit for connecting to one endpoint."""

_LINGER_SECONDS = 1.0
_KEEPALIVE = (("TCP_KEEPIDLE", 120), ("TCP_KEEPINTVL", 30), ("TCP_KEEPCNT", 6))


def tune(sock: socket.socket) -> None:
    """Disables Nagle's algorithm, and keeps firewalls from forgetting an idle connection.

    Lost peers are detected by the heartbeats of the connection's users.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def connect(endpoints: Sequence[Endpoint], deadline: float) -> socket.socket:
    """Connects to the first endpoint that answers.

    Args:
        endpoints: the endpoints to try, in order.
        deadline: the `time.monotonic()` at which to give up.

    Returns:
        The connection, in blocking mode.

    Raises:
        OSError: no endpoint answered; the error is the one of the last endpoint.
    """
    failure = OSError("no address")
    for endpoint in endpoints:
        try:
            sock = begin_connect(endpoint)
        except OSError as error:
            failure = error
            continue
        try:
            poll = select.poll()
            poll.register(sock, select.POLLOUT)
            if not poll.poll(1000 * max(0.1, min(CONNECT_SECONDS, deadline - time.monotonic()))):
                raise TimeoutError(errno.ETIMEDOUT, "timed out")
            finish_connect(sock)
            sock.setblocking(True)
            return sock
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:  # an interruption
            sock.close()
            raise
    raise failure


def begin_connect(endpoint: Endpoint) -> socket.socket:
    """Begins to connect; call `finish_connect` once the socket is writable.

    Returns:
        A non-blocking socket.

    Raises:
        OSError: the endpoint is unreachable.
    """
    family, sockaddr = endpoint
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # The kernel may choose another worker's port as the source port. With this option, that
        # worker can still bind the port.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            sock.connect(sockaddr)
    except BaseException:
        sock.close()
        raise
    return sock


def finish_connect(sock: socket.socket) -> None:
    """Checks and tunes a connection.

    Raises:
        OSError: the endpoint did not answer.
    """
    if error := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(error, os.strerror(error))
    if sock.getsockname() == sock.getpeername():
        # The kernel picked the dialed port as the source: a TCP self-connection.
        raise ConnectionRefusedError("nothing listens there")
    tune(sock)


def why_unreachable(error: OSError) -> str:
    """Returns why a worker cannot be reached, in terms of possible causes to check.

    Example:
        >>> why_unreachable(ConnectionRefusedError(111, "Connection refused"))
        'nothing listens there (Connection refused)'
    """
    reason = error.strerror or str(error)
    if isinstance(error, socket.gaierror):
        return f"its name does not resolve ({reason})"
    if isinstance(error, ConnectionRefusedError):
        return f"nothing listens there ({reason})"
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return f"there is no route to it ({reason})"
    if error.errno == errno.ETIMEDOUT:
        return f"it does not respond: a firewall, or a host that is down ({reason})"
    return reason


def send_at_once(sock: socket.socket, data: bytes) -> bool:
    """Sends a small frame without waiting.

    Returns:
        Whether all of it was sent; if not, the connection is unusable.
    """
    with contextlib.suppress(OSError):
        return sock.send(data, socket.MSG_DONTWAIT) == len(data)
    return False


def end_gently(sock: socket.socket) -> None:
    """Ends a connection after the peer has had time to read the last frame.

    Closing the connection at once, with unread input, would discard that frame.
    """
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_WR)
        deadline = time.monotonic() + _LINGER_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            sock.settimeout(left)
            if not socket.socket.recv(sock, 4096):
                return


def has_ended(sock: socket.socket) -> bool:
    """Whether the peer has closed the connection and nothing is left to read."""
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
