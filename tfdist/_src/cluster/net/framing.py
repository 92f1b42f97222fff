"""Encodes and decodes the frames on a control connection.

A frame consists of a JSON header and a payload. The size of a frame is limited.
"""

import json
import select
import socket
import ssl
import struct
import time
from collections.abc import Generator
from typing import Any


def printable(text: str) -> str:
    """Replaces each character that is not printable with a question mark.

    Example:
        >>> printable("a\\tb")
        'a?b'
    """
    return "".join(c if c.isprintable() else "?" for c in text)


HELLO_LIMIT = 64 * 1024
CLUSTER_LIMIT = 16 * 1024 * 1024
"""The limit before the session begins: rank 0 sends its cluster to a worker with another one."""
FRAME_LIMIT = 128 * 1024 * 1024

_LENGTHS = struct.Struct("!II")
_POLL_SECONDS = 0.5

Header = dict[str, Any]
Frame = tuple[Header, bytes]


class WireError(ValueError):
    """Raised when the bytes from a peer violate the protocol, or when the peer is rejected."""


def encode(header: Header, payload: bytes = b"") -> bytes:
    """Encodes a frame.

    Args:
        header: the header, which must be serializable as JSON.
        payload: the payload; any bytes are allowed.

    Returns:
        The length of the header and the length of the payload (4 bytes each), followed by the
        header as JSON and the payload.

    Example:
        >>> Decoder(100).feed(encode({"kind": "beat"}))
        [({'kind': 'beat'}, b'')]
    """
    text = json.dumps(header).encode()
    return _LENGTHS.pack(len(text), len(payload)) + text + payload


class Decoder:
    """Splits a stream of bytes into frames.

    Args:
        limit: the maximum size of a frame in bytes, for the header and the payload together.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Adds bytes from the stream, and returns the frames that are now complete.

        Args:
            data: the next bytes of the stream. They may end in the middle of a frame.

        Returns:
            The complete frames. Each frame is a tuple of a header and a payload.

        Raises:
            WireError: the bytes are not a valid frame, or the frame is too large.
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
    """Reads one frame from a socket, and no bytes after the frame.

    Args:
        sock: a connected socket.
        limit: the maximum size of the frame (see `Decoder`).
        deadline: the `time.monotonic()` at which to give up.

    Returns:
        The header and the payload.

    Raises:
        WireError: the bytes are not a valid frame, or the frame is too large.
        OSError: the connection ended, or the deadline passed.
    """
    steps = frame_steps(limit)
    count = next(steps)
    while True:
        try:
            count = steps.send(read_exactly(sock, count, deadline))
        except StopIteration as end:
            frame: Frame = end.value
            return frame


def frame_steps(limit: int) -> Generator[int, bytes, Frame]:
    """Decodes one frame in a generator that does no I/O.

    The generator yields the number of bytes to read next. The caller reads these bytes and sends
    them to the generator, which finally returns the frame.
    """
    lengths = yield _LENGTHS.size
    header, end = _extent(lengths, limit)
    body = yield end - _LENGTHS.size
    cut = header - _LENGTHS.size
    return _header(body[:cut]), body[cut:]


def read_exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    """Reads `count` bytes from a socket.

    Raises:
        OSError: the connection ended, or the deadline passed.
    """
    data = bytearray()
    while len(data) < count:
        data += read_some(sock, min(count - len(data), 64 * 1024), deadline)
    return bytes(data)


def read_some(sock: socket.socket, most: int, deadline: float) -> bytes:
    """Reads at least one byte and at most `most` bytes from a socket.

    Raises:
        OSError: the connection ended, or the deadline passed.
    """
    while True:
        # Wait for a short time only. If another thread has received a signal, the main thread can
        # run the Python handler of the signal only between two waits.
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("it was silent or too slow")
        if not readable(sock, min(left, _POLL_SECONDS)):
            continue
        try:
            part = sock.recv(most, socket.MSG_DONTWAIT)
        except BlockingIOError:  # the TLS record is still incomplete
            continue
        if not part:
            raise ConnectionError("connection closed")
        return part


def readable(sock: socket.socket, seconds: float) -> bool:
    """Waits until a socket can be read; returns False if it cannot be read in time.

    A socket can be read if it has received data, or if the connection has ended.
    """
    if isinstance(sock, ssl.SSLSocket) and sock.pending():
        return True
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _extent(data: bytes | bytearray, limit: int) -> tuple[int, int]:
    """Returns the positions in `data` at which the first frame's header and payload end."""
    header, payload = _LENGTHS.unpack_from(data)
    if header + payload > limit:
        raise WireError(f"it announced {header + payload} bytes, but only {limit} are allowed")
    return _LENGTHS.size + header, _LENGTHS.size + header + payload


def _header(text: bytes) -> Header:
    try:
        header = json.loads(text.decode())  # json would guess the encoding of bytes
    except (ValueError, RecursionError):
        raise WireError("it sent a header that is not JSON") from None
    if not isinstance(header, dict) or not isinstance(header.get("kind"), str):
        raise WireError("it sent a header without a kind")
    return header
