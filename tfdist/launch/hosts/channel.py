"""A connection between two launchers: one JSON object per line, of bounded length."""

from __future__ import annotations

import json
import socket
from typing import Any

Message = dict[str, Any]

_LONGEST_LINE = 1 << 20
_READ_SIZE = 65536
_SEND_SECONDS = 5.0
# A host that vanishes silently is noticed after about 15 + 3 * 5 seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30000}


class ChannelError(Exception):
    """The connection is closed. The text continues a sentence whose subject is the peer."""


class ProtocolError(ChannelError):
    """The peer is not a tfdist launcher, or fails to authenticate."""


class Channel:
    """Sends and receives messages over a connected TCP socket, which it owns.

    Args:
        connection: the socket.

    Attributes:
        peer: the IP address of the peer.
        local: the IP address of this end.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._rest = b""
        connection.settimeout(_SEND_SECONDS)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.peer = _address(connection.getpeername())
        self.local = _address(connection.getsockname())

    def fileno(self) -> int:
        """The descriptor to wait on before `receive`."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Sends one message.

        Raises:
            ChannelError: the peer is gone, or accepts no data for 5 seconds.
        """
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ChannelError(f"lost the connection ({error})") from error

    def receive(self) -> list[Message]:
        """Reads what has arrived; call it when the descriptor is readable.

        Returns:
            The messages that are now complete, possibly none.

        Raises:
            ChannelError: the connection is closed.
            ProtocolError: the data received is not a message.
        """
        try:
            data = self._socket.recv(_READ_SIZE)
        except TimeoutError:
            return []
        except OSError as error:
            raise ChannelError(f"lost the connection ({error})") from error
        if not data:
            raise ChannelError("closed the connection")
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            raise ProtocolError("is not a tfdist launcher: it sent a line longer than 1 MiB")
        return [_message(line) for line in lines]

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()


def _message(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("is not a tfdist launcher: it sent data that is not JSON") from error
    if not isinstance(message, dict):
        raise ProtocolError("is not a tfdist launcher: it sent JSON that is not an object")
    return message


def _address(name: tuple[Any, ...]) -> str:
    """The IP address of a socket's name, with IPv4-mapped IPv6 addresses shown as IPv4."""
    return str(name[0]).removeprefix("::ffff:")
