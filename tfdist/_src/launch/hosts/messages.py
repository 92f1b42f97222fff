"""Messages between two launchers that have authenticated each other, as frames."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass, field
from typing import Any

from tfdist._src.cluster.net.framing import Decoder, WireError, encode
from tfdist._src.cluster.rendezvous.acceptor import shown_ip

Message = tuple[str, Any]
"""A kind, and a value that JSON can represent."""

_LONGEST = 1 << 20
_READ_SIZE = 65536
_SEND_SECONDS = 5.0
# A host that vanishes silently is noticed after about 15 + 3 * 5 seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30000}


class ChannelError(Exception):
    """The connection is closed. The text continues a sentence whose subject is the peer."""


@dataclass(frozen=True)
class Start:
    """What host 0 sends to another host, which then starts its workers.

    Attributes:
        workers: `"host:port"` of every worker of the job, in rank order.
        first: the rank of the host's first worker.
        secret: the job's secret; "" if the user has set it on all hosts.
        running: whether the job runs already, and this launcher has come again.
    """

    workers: tuple[str, ...]
    first: int
    secret: str = field(default="", repr=False)
    running: bool = False


class Channel:
    """Sends and receives messages over a connected socket, which it owns.

    Args:
        connection: the socket, after the handshake.

    Raises:
        OSError: the connection has ended.

    Attributes:
        peer: the IP address of the peer.
        port: the port of the peer.
        local: the IP address of this end.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._decoder = Decoder(_LONGEST)
        connection.settimeout(_SEND_SECONDS)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        peer = connection.getpeername()
        self.peer = shown_ip(peer)
        self.port: int = peer[1]
        self.local = shown_ip(connection.getsockname())

    def fileno(self) -> int:
        """The descriptor to wait on before `receive`."""
        return self._socket.fileno()

    def send(self, kind: str, value: object = None) -> None:
        """Sends one message.

        If the peer is gone, or accepts no data for 5 seconds, the connection ends, which `receive`
        tells.
        """
        try:
            self._socket.sendall(encode({"kind": kind, "value": value}))
        except OSError:
            # What follows a part of a message could not be read.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def receive(self) -> list[Message]:
        """Reads what has arrived; call it when the descriptor is readable.

        Returns:
            The messages that are now complete, possibly none.

        Raises:
            ChannelError: the connection is closed, or the data received are not messages.
        """
        try:
            data = self._socket.recv(_READ_SIZE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ChannelError(f"lost the connection ({error})") from error
        if not data:
            raise ChannelError("closed the connection")
        try:
            return [(header["kind"], header.get("value")) for header, _ in self._decoder.feed(data)]
        except WireError as error:
            raise ChannelError(f"sent no messages: {error}") from error

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()
