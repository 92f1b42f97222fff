"""Frames survive any split of the stream; invalid frames are rejected."""

import socket
import struct
import time

import pytest

from tests.harness.deadlines import FAR
from tfdist._src.cluster.auth.handshake import MAGIC, handshake
from tfdist._src.cluster.auth.identity import Identity
from tfdist._src.cluster.net.framing import Decoder, WireError, encode, read_frame
from tfdist._src.cluster.session.shared_state import decode_error, encode_error
from tfdist._src.cluster.tf_config import from_tf_config
from tfdist.errors import ClusterError, ProgramMismatchError

TOPOLOGY = from_tf_config(
    '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
)
FRAMES = [
    ({"kind": "beat"}, b""),
    ({"kind": "join", "tag": "ä"}, b"\0" * 1000),
    ({"kind": "x"}, b"y"),
]


def lengths(header, payload=0):
    return struct.pack("!II", header, payload)


BAD = [
    (lengths(2000), "announced 2000 bytes"),
    (lengths(10, 2**32 - 1), "announced"),
    (lengths(3) + b"{{{", "not JSON"),
    (lengths(3) + b"\xff\xfe\xfd", "not JSON"),
    (lengths(1000) + b"[" * 1000, "not JSON"),
    (lengths(2) + b"[]", "without a kind"),
    (lengths(10) + b'{"kind":1}', "without a kind"),
]


@pytest.fixture
def pair():
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_the_decoder_restores_frames_however_the_stream_is_cut():
    stream = b"".join(encode(*frame) for frame in FRAMES)
    for cut in (1, 7, 100, 10**6):
        decoder = Decoder(2000)
        found = []
        for start in range(0, len(stream), cut):
            found += decoder.feed(stream[start : start + cut])
        assert found == FRAMES


def test_the_decoder_rejects_invalid_frames():
    for data, message in BAD:
        with pytest.raises(WireError, match=message):
            Decoder(1500).feed(data)


@pytest.mark.parametrize(("data", "message"), BAD)
def test_read_frame_rejects(pair, data, message):
    pair[0].sendall(data)
    with pytest.raises(WireError, match=message):
        read_frame(pair[1], 1500, time.monotonic() + FAR)


def test_read_frame_reads_no_further(pair):
    for frame in FRAMES:
        pair[0].sendall(encode(*frame))
    deadline = time.monotonic() + FAR
    assert [read_frame(pair[1], 2000, deadline) for _ in FRAMES] == FRAMES


def test_read_frame_deadline_and_end(pair):
    pair[0].sendall(encode(*FRAMES[1])[:50])
    with pytest.raises(TimeoutError):
        read_frame(pair[1], 2000, time.monotonic() + 0.05)
    pair[0].close()
    with pytest.raises(ConnectionError, match="closed"):
        read_frame(pair[1], 2000, time.monotonic() + FAR)


def test_a_handshake_gives_both_sides_the_other_identity(pair, in_parallel):
    hello = Identity.of(TOPOLOGY)
    deadline = time.monotonic() + FAR
    both = in_parallel(lambda n: handshake(pair[n], hello, "", deadline, first=n == 0), [0, 1])
    assert both == [hello, hello]
    assert str(hello).startswith("worker 1 (b:1), process ")


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01",
        MAGIC + encode({"kind": "hello"}),
        MAGIC + encode({"kind": "hello", **vars(Identity.of(TOPOLOGY)), "rank": -1}),
        MAGIC + encode({"kind": "hello", **vars(Identity.of(TOPOLOGY)), "pid": "1"}),
        MAGIC + encode({"kind": "hello", **vars(Identity.of(TOPOLOGY)), "worker": [1]}),
        MAGIC + encode({"kind": "hello", **vars(Identity.of(TOPOLOGY)), "host": "a\nb"}),
        MAGIC + encode({"kind": "hello", **vars(Identity.of(TOPOLOGY)), "host": "a" * 1000}),
        MAGIC + encode({"kind": "hello", **vars(Identity.of(TOPOLOGY))}),
        MAGIC + encode({"kind": "bye", **vars(Identity.of(TOPOLOGY))}),
        MAGIC + lengths(2**31),
    ],
)
def test_a_stranger_is_rejected_without_an_answer(pair, words):
    pair[0].sendall(words)
    with pytest.raises(WireError):
        handshake(pair[1], Identity.of(TOPOLOGY), "", time.monotonic() + FAR, first=False)
    pair[0].setblocking(False)
    with pytest.raises(BlockingIOError):
        pair[0].recv(1)


def test_errors_are_encoded():
    for error in (ClusterError("one"), ProgramMismatchError("two")):
        back = decode_error(encode_error("error", error))
        assert (type(back), str(back)) == (type(error), str(error))


def test_unknown_errors_are_rejected():
    for header in ({}, {"type": "SystemExit", "message": "x"}, {"type": 1}):
        with pytest.raises(WireError):
            decode_error(header)
