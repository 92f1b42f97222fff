"""Frames on a control connection: a JSON header and a payload of bounded size."""

import json
import select
import socket
import ssl
import struct
import time
from collections.abc import Generator
from typing import Any


def printable(text: str) -> str:
    """Returns the text with a question mark for each character that is not printable.

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
    """The received bytes violate the protocol."""


def encode(header: Header, payload: bytes = b"") -> bytes:
    """Encodes a frame.

    Args:
        header: a JSON-serializable header.
        payload: any bytes.

    Returns:
        Two 4-byte lengths, the header as JSON, and the payload.

    Example:
        >>> Decoder(100).feed(encode({"kind": "beat"}))
        [({'kind': 'beat'}, b'')]
    """
    text = json.dumps(header).encode()
    return _LENGTHS.pack(len(text), len(payload)) + text + payload


class Decoder:
    """Splits a stream of bytes into frames.

    Args:
        limit: the maximum size of a header and its payload together, in bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Consumes the received bytes and returns the frames that they complete.

        Args:
            data: the next bytes of the stream.

        Returns:
            The frames, each a header and a payload.

        Raises:
            WireError: the stream does not consist of frames.
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
    """Reads exactly one frame.

    Args:
        sock: a connected socket.
        limit: see `Decoder`.
        deadline: the `time.monotonic()` at which to give up.

    Returns:
        The header and the payload.

    Raises:
        WireError: the bytes are not a frame.
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
    """Decodes one frame; yields the number of bytes to read next, and receives those bytes."""
    lengths = yield _LENGTHS.size
    header, end = _extent(lengths, limit)
    body = yield end - _LENGTHS.size
    cut = header - _LENGTHS.size
    return _header(body[:cut]), body[cut:]


def read_exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    """Reads `count` bytes; raises OSError at the end of the stream or at the deadline."""
    data = bytearray()
    while len(data) < count:
        data += read_some(sock, min(count - len(data), 64 * 1024), deadline)
    return bytes(data)


def read_some(sock: socket.socket, most: int, deadline: float) -> bytes:
    """Reads at least one byte and at most `most`; raises OSError as `read_exactly` does."""
    while True:
        # Poll, so that the main thread handles signals that another thread received.
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("it was silent or too slow")
        if not readable(sock, min(left, _POLL_SECONDS)):
            continue
        try:
            part = sock.recv(most, socket.MSG_DONTWAIT)
        except BlockingIOError:  # an incomplete TLS record
            continue
        if not part:
            raise ConnectionError("connection closed")
        return part


def readable(sock: socket.socket, seconds: float) -> bool:
    """Waits until a socket has data to read, or has ended."""
    if isinstance(sock, ssl.SSLSocket) and sock.pending():
        return True
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _extent(data: bytes | bytearray, limit: int) -> tuple[int, int]:
    """Returns the ends of the header and of the payload of the frame at the start of `data`."""
    header, payload = _LENGTHS.unpack_from(data)
    if header + payload > limit:
        raise WireError(f"it announced {header + payload} bytes, but only {limit} are allowed")
    return _LENGTHS.size + header, _LENGTHS.size + header + payload


def _header(text: bytes) -> Header:
    try:
        header = json.loads(text.decode())  # given bytes, json would guess the encoding
    except (ValueError, RecursionError):
        raise WireError("it sent a header that is not JSON") from None
    if not isinstance(header, dict) or not isinstance(header.get("kind"), str):
        raise WireError("it sent a header without a kind")
    return header
