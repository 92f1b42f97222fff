"""Whatever a stranger sends ends in a rejection, not in another exception."""

from __future__ import annotations

import random

import pytest

from tests.harness.tiers import exhaustive
from tfdist._src.cluster import Topology, Worker
from tfdist._src.cluster.auth.handshake import MAGIC, ReadBytes, TlsMismatch, dialing, listening
from tfdist._src.cluster.auth.identity import Identity
from tfdist._src.cluster.net.framing import Decoder, WireError, encode
from tfdist._src.cluster.session.shared_state import decode_result
from tfdist.errors import ClusterError

WORKERS = (Worker("worker", 0, "a:1"), Worker("worker", 1, "b:1"))
LISTENER = Identity.of(Topology(WORKERS, 0, "worker", 0))
DIALER = Identity.of(Topology(WORKERS, 1, "worker", 1))
JSON = [b"{", b"}", b"[", b"]", b'"', b":", b",", b"null", b"1e400", b"-1", b"\xff", b"NaN", b"\\u"]


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Some bytes changed, cut out, repeated or replaced by pieces of JSON."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 6)):
        place = draw.randrange(len(changed) + 1)
        end = min(len(changed), place + draw.choice([0, 1, 1, 4, 20]))
        piece = draw.choice([b"", draw.randbytes(1), draw.randbytes(4), draw.choice(JSON)])
        changed[place:end] = piece
    return bytes(changed)


def run(steps, data: bytes) -> None:
    """Answers a handshake with these bytes, until they are used up or it ends."""
    place = 0
    try:
        step = next(steps)
        while True:
            answer = b""
            if isinstance(step, ReadBytes):
                answer = data[place : place + step.count]
                place += step.count
                if not answer or (place > len(data) and not step.some):
                    return
            step = steps.send(answer)
    except (StopIteration, WireError, TlsMismatch, ClusterError):
        pass


def conversation() -> tuple[bytes, bytes]:
    """What the dialer and the listener of a handshake say."""
    said = {"dialer": b"", "listener": b""}
    ends = {
        "dialer": dialing(DIALER, "s", False, "it"),
        "listener": listening(LISTENER, "s", False),
    }
    steps = {name: next(end) for name, end in ends.items()}
    read = {"dialer": 0, "listener": 0}
    done: set[str] = set()
    while len(done) < 2:
        for name, other in (("dialer", "listener"), ("listener", "dialer")):
            if name in done:
                continue
            step, answer = steps[name], b""
            if isinstance(step, ReadBytes):
                answer = said[other][read[name] : read[name] + step.count]
                if len(answer) < (1 if step.some else step.count):
                    continue
                read[name] += len(answer)
            else:
                said[name] += step.data
            try:
                steps[name] = ends[name].send(answer)
            except StopIteration:
                done.add(name)
    return said["dialer"], said["listener"]


@exhaustive
@pytest.mark.parametrize("seed", range(4))
def test_mutated_handshakes_end_in_rejections(seed):
    draw = random.Random(seed)
    dialer, listener = conversation()
    assert dialer.startswith(MAGIC) and listener.startswith(MAGIC)
    for _ in range(20_000):
        run(listening(LISTENER, "s", False), mutated(dialer, draw))
        run(dialing(DIALER, "s", False, "it"), mutated(listener, draw))


@exhaustive
@pytest.mark.parametrize("seed", range(4))
def test_mutated_frames_end_in_rejections(seed):
    draw = random.Random(seed)
    frames = [
        encode(
            {"kind": "join", "sequence": 3, "tag": "a", "timeout": 1.0, "variable": "V"}, b"xyz"
        ),
        encode({"kind": "result", "sequence": 3, "sizes": [1, 2], "runs": [[0, 2]]}, b"xyz"),
        encode({"kind": "beat"}),
    ]
    for _ in range(20_000):
        data = mutated(b"".join(draw.sample(frames, 2)), draw)
        try:
            for header, payload in Decoder(1 << 20).feed(data):
                if header["kind"] == "result":
                    decode_result(header, payload, 2)
        except (WireError, LookupError, TypeError, ValueError):
            pass
