"""Opens, configures and closes connections, and manages their file descriptors."""

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
    """An object that owns a file descriptor, such as a socket."""

    def fileno(self) -> int: ...

    def detach(self) -> int: ...

    def close(self) -> None: ...


class Descriptor:
    """The owner of a file descriptor that is not a socket.

    Args:
        number: an open descriptor; -1 for an object that owns no descriptor.
    """

    def __init__(self, number: int) -> None:
        self._number = number

    def fileno(self) -> int:
        """Returns the descriptor; -1 after `detach` or `close`."""
        return self._number

    def detach(self) -> int:
        """Returns the descriptor, which this object no longer owns and does not close."""
        number, self._number = self._number, -1
        return number

    def close(self) -> None:
        """Closes the descriptor; may be called repeatedly."""
        if (number := self.detach()) >= 0:
            os.close(number)


def allow_descriptors(count: int) -> None:
    """Raises the soft limit of open descriptors if it is too low for `count` more descriptors.

    Raises:
        OSError: the hard limit, which a process cannot raise, is too low.
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
    """Makes forked children close a descriptor, as long as `owner` owns it.

    Each forked child has a copy of the descriptor. Without this function, the copy would keep the
    connection open after this process has died, and the peer would not notice the death.

    Args:
        owner: the owner of the descriptor.

    Returns:
        The argument `owner`.
    """
    _owners.add(owner)
    return owner


def _after_fork() -> None:
    for owner in list(_owners):
        with contextlib.suppress(OSError):  # the native core may have closed the descriptor
            owner.close()


os.register_at_fork(after_in_child=_after_fork)


CONNECT_SECONDS = 3.0
"""The time limit for connecting to one endpoint."""

_LINGER_SECONDS = 1.0
_KEEPALIVE = (("TCP_KEEPIDLE", 120), ("TCP_KEEPINTVL", 30), ("TCP_KEEPCNT", 6))


def tune(sock: socket.socket) -> None:
    """Disables Nagle's algorithm, and enables TCP keepalive.

    Keepalive only prevents firewalls from dropping idle connections. Lost peers are detected by
    heartbeats, which the users of a connection send themselves.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def connect(endpoints: Sequence[Endpoint], deadline: float) -> socket.socket:
    """Tries to connect to each endpoint in turn; returns the first connection that succeeds.

    Args:
        endpoints: the endpoints to try, in order.
        deadline: the `time.monotonic()` at which to give up.

    Returns:
        The connection, in blocking mode.

    Raises:
        OSError: none of the attempts has succeeded. This is the error of the last attempt.
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
        except BaseException:  # for example, KeyboardInterrupt
            sock.close()
            raise
    raise failure


def begin_connect(endpoint: Endpoint) -> socket.socket:
    """Starts to connect to an endpoint, without waiting.

    Returns:
        A non-blocking socket. Once the socket is writable, the caller must call `finish_connect`.

    Raises:
        OSError: the attempt has failed immediately, for example because there is no route.
    """
    family, sockaddr = endpoint
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # The kernel may use the port of another worker on this host as the source port. With this
        # option, the other worker can still bind its port.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            sock.connect(sockaddr)
    except BaseException:
        sock.close()
        raise
    return sock


def finish_connect(sock: socket.socket) -> None:
    """Checks that an attempt to connect has succeeded, and configures the connection.

    Raises:
        OSError: the attempt has failed.
    """
    if error := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(error, os.strerror(error))
    if sock.getsockname() == sock.getpeername():
        # The kernel has chosen the destination port as the source port, so the socket is connected
        # to itself.
        raise ConnectionRefusedError("nothing listens there")
    tune(sock)


def why_unreachable(error: OSError) -> str:
    """Describes why this process cannot connect to a worker, in a clause for error messages.

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
    """Sends a small frame without blocking.

    Returns:
        Whether the whole frame was sent. If False, the caller must not send more frames, because
        the peer may have received a part of this one.
    """
    with contextlib.suppress(OSError):
        return sock.send(data, socket.MSG_DONTWAIT) == len(data)
    return False


def end_gently(sock: socket.socket) -> None:
    """Shuts down a connection, and waits until the peer has closed it, for up to one second.

    If this process closed the connection immediately while there is unread input, the kernel could
    discard the last frame before the peer has read it.
    """
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_WR)
        deadline = time.monotonic() + _LINGER_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            sock.settimeout(left)
            if not socket.socket.recv(sock, 4096):
                return


def has_ended(sock: socket.socket) -> bool:
    """Whether the connection has ended and all received data has been read."""
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
