"""Finds free ports for the workers, and reserves them while the job runs."""

from __future__ import annotations

import socket
from types import TracebackType

from tfdist.errors import LaunchError


class Reservation:
    """Reserves free ports of this host for the workers, until `close` is called.

    For each port, this process has a socket that sets SO_REUSEADDR, is bound to the port on all
    addresses of the host, and never listens. A worker can still bind the port and listen on it, on
    one address or on all, if it also sets SO_REUSEADDR. TensorFlow's gRPC server and
    `socket.create_server` do this. Other programs do not get the port by accident: Linux neither
    uses it for outgoing connections nor assigns it to a program that requests any free port. A
    program that binds the port without SO_REUSEADDR fails. Until the worker listens, connections to
    the port are refused.

    Args:
        count: the number of ports.
        avoid: a port that must not be reserved, because the job needs it for another purpose.

    Attributes:
        ports: the port numbers, all different.

    Raises:
        LaunchError: no free port is left.

    Example:
        >>> with Reservation(2) as reservation:
        ...     len(set(reservation.ports))
        2
    """

    def __init__(self, count: int, avoid: int | None = None) -> None:
        self._sockets: list[socket.socket] = []
        refused: list[socket.socket] = []
        try:
            while len(self._sockets) < count:
                held = _hold_any()
                if held.getsockname()[1] == avoid:
                    # Keep the socket open, so that the system does not assign the same port again.
                    refused.append(held)
                else:
                    self._sockets.append(held)
        except OSError as error:
            self.close()
            raise LaunchError(
                f"This host has no free port for a worker ({error}). "
                f"Start fewer workers, or stop programs that hold many connections."
            ) from error
        finally:
            for held in refused:
                held.close()
        self.ports: tuple[int, ...] = tuple(held.getsockname()[1] for held in self._sockets)

    def close(self) -> None:
        """Releases the ports."""
        for held in self._sockets:
            held.close()
        self._sockets = []

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _hold_any() -> socket.socket:
    try:
        return _hold(socket.AF_INET6, "::")
    except OSError:
        return _hold(socket.AF_INET, "0.0.0.0")  # No IPv6.


def _hold(family: socket.AddressFamily, address: str) -> socket.socket:
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.bind((address, 0))
    except OSError:
        held.close()
        raise
    return held
