"""Frames on a control connection: a JSON header and bytes, of bounded length, never unpickled."""

from __future__ import annotations

import json
import select
import socket
import ssl
import struct
import time
from typing import Any

HELLO_LIMIT = 64 * 1024
FRAME_LIMIT = 128 * 1024 * 1024

_LENGTHS = struct.Struct("!II")
_SLICE = 0.5

Header = dict[str, Any]
Frame = tuple[Header, bytes]


class WireError(ValueError):
    """What came over a connection is no frame."""


def encode(header: Header, payload: bytes = b"") -> bytes:
    """The bytes of a frame.

    Args:
        header: what JSON can hold.
        payload: any bytes.

    Returns:
        Two lengths of 4 bytes, the header as JSON, the payload.

    Example:
        >>> Decoder(100).feed(encode({"kind": "beat"}))
        [({'kind': 'beat'}, b'')]
    """
    text = json.dumps(header).encode()
    return _LENGTHS.pack(len(text), len(payload)) + text + payload


class Decoder:
    """Cuts a stream of bytes into frames.

    Args:
        limit: the length in bytes that a header and its payload may have together.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Takes what has arrived and returns the frames that are now complete.

        Args:
            data: the next bytes of the stream.

        Returns:
            The frames, each a header and a payload.

        Raises:
            WireError: the stream holds no frames.
        """
        self._pending += data
        frames = []
        while len(self._pending) >= _LENGTHS.size:
            header, end = _extent(self._pending, self._limit)
            if len(self._pending) < end:
                break
            text = bytes(self._pending[_LENGTHS.size : header])
            frames.append((_header(text), bytes(self._pending[header:end])))
            del self._pending[:end]
        return frames


def read_frame(sock: socket.socket, limit: int, deadline: float) -> Frame:
    """Reads one frame and not a byte more.

    Args:
        sock: a connected socket.
        limit: as for `Decoder`.
        deadline: the `time.monotonic()` at which to give up.

    Returns:
        The header and the payload.

    Raises:
        WireError: what came is no frame.
        OSError: the connection ended, or the deadline passed.
    """
    lengths = read_exactly(sock, _LENGTHS.size, deadline)
    header, end = _extent(lengths, limit)
    body = read_exactly(sock, end - _LENGTHS.size, deadline)
    cut = header - _LENGTHS.size
    return _header(body[:cut]), body[cut:]


def read_exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    """Reads `count` bytes; raises OSError at the end of the stream or at the deadline."""
    data = bytearray()
    while len(data) < count:
        # Short slices: a signal that another thread received is still obeyed.
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("it was silent or too slow")
        if not readable(sock, min(left, _SLICE)):
            continue
        try:
            part = sock.recv(min(count - len(data), 64 * 1024), socket.MSG_DONTWAIT)
        except BlockingIOError:  # a part of what TLS can decrypt only whole
            continue
        if not part:
            raise ConnectionError("connection closed")
        data += part
    return bytes(data)


def readable(sock: socket.socket, seconds: float) -> bool:
    """Waits until a socket has something to read, or has ended."""
    if isinstance(sock, ssl.SSLSocket) and sock.pending():
        return True
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _extent(data: bytes | bytearray, limit: int) -> tuple[int, int]:
    """Where the header and where the payload end of the frame at the start of `data`."""
    header, payload = _LENGTHS.unpack_from(data)
    if header + payload > limit:
        raise WireError(f"it announced {header + payload} bytes where {limit} are allowed")
    return _LENGTHS.size + header, _LENGTHS.size + header + payload


def _header(text: bytes) -> Header:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise WireError("it sent a header that is not JSON") from None
    if not isinstance(header, dict) or not isinstance(header.get("kind"), str):
        raise WireError("it sent a header without a kind")
    return header
