"""Free ports for the workers, held for them while the job runs."""

from __future__ import annotations

import socket
from types import TracebackType

from tfdist.errors import LaunchError


class Reservation:
    """Ports of this machine that no other program gets, until closed.

    Each port is held by a socket that is bound to every address of the machine, with
    SO_REUSEADDR, and never listens. Linux then lets a worker that sets SO_REUSEADDR too
    (TensorFlow's gRPC server does, and `socket.create_server`) bind the port and listen on it,
    on one address or on all. A program that asks for any free port is given another one, an
    outgoing connection does not leave from it, and binding it without SO_REUSEADDR fails. Until
    the worker listens, who connects is refused.

    Args:
        count: how many ports.
        avoid: a port that something else of the job will listen on.

    Attributes:
        ports: the port numbers, all different.

    Raises:
        LaunchError: the machine has no free port left.

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
                    refused.append(held)  # Held too, so that the next one is another.
                else:
                    self._sockets.append(held)
        except OSError as error:
            self.close()
            raise LaunchError(
                f"This machine has no free port for a worker ({error}). "
                f"Start fewer workers, or end programs that hold many connections."
            ) from error
        finally:
            for held in refused:
                held.close()
        self.ports: tuple[int, ...] = tuple(held.getsockname()[1] for held in self._sockets)

    def close(self) -> None:
        """Gives the ports back."""
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
        return _hold(socket.AF_INET, "0.0.0.0")  # A machine without IPv6.


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
