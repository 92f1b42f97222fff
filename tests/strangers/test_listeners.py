"""Whatever strangers send: nothing ends, nothing grows, and honest peers are served."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import select
import socket
import threading
import time

import pytest

from tests.cluster.test_fuzz import mutated
from tests.harness.tiers import exhaustive
from tests.strangers.listeners import LISTENERS, SECRET, dial, until
from tfdist._src.cluster.auth.handshake import MAGIC, TLS_MAGIC
from tfdist._src.cluster.auth.identity import JOIN, Identity
from tfdist._src.cluster.net.framing import encode

INFINITE = b'{"hello":{"number":Infinity,"ports":[1e400]},"challenge":"' + b"0" * 64 + b'"}\n'
REQUEST = b"GET /metrics HTTP/1.1\r\nHost: a\r\nAccept: text/plain\r\n\r\n"
# A line about an address at once, and then one in ten seconds.
LINES, SECONDS = 2, 10.0
OPEN = 40
# Lines about peers that leave, and about those that are awaited.
MORE_LINES = 10
# What may be left of thousands of connections: some are still open, and caches have been filled.
OBJECTS, MEBIBYTES = 300, 8


class Replay:
    """What a peer that has the secret has once said."""

    def __init__(self, port: int, mine: Identity) -> None:
        """Takes down what a peer says, on a proxy's way to the listener."""
        self.said = b""
        with socket.create_server(("127.0.0.1", 0)) as proxy:
            thread = threading.Thread(target=self._pass_on, args=[proxy, port])
            thread.start()
            dial(proxy.getsockname()[1], mine).close()
            thread.join()

    def _pass_on(self, proxy: socket.socket, port: int) -> None:
        peer, _ = proxy.accept()
        with peer, socket.create_connection(("127.0.0.1", port)) as listener:
            ends = {peer: listener, listener: peer}
            with contextlib.suppress(OSError):  # one of the two has gone
                while True:
                    for one in select.select(list(ends), [], [])[0]:
                        data = one.recv(65536)
                        if not data:
                            return
                        self.said += data if one is peer else b""
                        ends[one].sendall(data)


def seeds(port: int, mine: Identity | None) -> list[bytes]:
    """What strangers' data are made of."""
    hello = vars(mine or Identity.of_other("host 1", JOIN))
    said = encode({"kind": "hello", **hello, "challenge": "0" * 64})
    return [
        Replay(port, mine).said if mine else REQUEST,
        MAGIC + said,
        MAGIC + said + encode({"kind": "proof", "proof": "0" * 64}),
        TLS_MAGIC + bytes.fromhex("16030100050100000100"),
        MAGIC + b"\xff" * 8,
        MAGIC + b"\0\0\xff\0\0\0\0\0" + b"[" * 0xFF00,
        MAGIC + encode({"kind": "hello", "rank": 1e400}),
        INFINITE,
        REQUEST,
        REQUEST.replace(b"Host: a", b"Host: " + b"a" * 70_000),
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
        MAGIC + said + b"\0" * (1 << 20),
        b"\0",
        b"",
    ]


def attack(port: int, seeds: list[bytes], seconds: float, draw: random.Random) -> int:
    """Connects again and again, and keeps some connections open for a while; returns how often.

    What is kept is continued slowly, byte by byte.
    """
    kept: list[tuple[socket.socket, list[bytes]]] = []
    count, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        count += 1
        data = draw.choice(seeds)
        if draw.random() < 0.3:
            data = mutated(data, draw)
        if draw.random() < 0.2:
            data = data[: draw.randint(0, len(data))]
        if draw.random() < 0.1:
            data = draw.randbytes(draw.randint(1, 3000))
        sock = socket.create_connection(("127.0.0.1", port))
        sock.setblocking(False)
        rest: list[bytes] = []
        kept.append((sock, rest))
        with contextlib.suppress(OSError):
            place = sock.send(data[: draw.choice([1, 9, 1000, 1 << 20])])
            if draw.random() < 0.3 and select.select([sock], [], [], 0.01)[0]:
                sock.recv(65536)
            if draw.random() < 0.2:
                rest += [data[i : i + 1] for i in range(place, min(place + 200, len(data)))]
            else:
                sock.send(data[place:])
        slow, rest = draw.choice(kept)
        if rest:
            with contextlib.suppress(OSError):
                slow.send(rest.pop(0))
        if draw.random() < 0.5 or len(kept) > OPEN:
            kept.pop(draw.randrange(len(kept)))[0].close()
    for sock, _ in kept:
        sock.close()
    return count


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def mebibytes() -> float:
    """The memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.parametrize(
    ("seconds", "most_silent"), [(0.15, 50), pytest.param(60.0, 1000, marks=exhaustive)]
)
@pytest.mark.parametrize("listener", LISTENERS, ids=lambda one: one.__name__)
def test_strangers_do_not_keep_a_listener_from_honest_peers(listener, seconds, most_silent, capfd):
    draw = random.Random(0)
    with listener() as one:
        one.serve_peer()
        data = seeds(one.port, one.peer)
        assert one.peer is None or b"proof" in data[0]
        capfd.readouterr()
        start = time.monotonic()
        threads, open_before = threading.active_count(), descriptors()
        # Silent ones, more than it keeps at a time.
        count = min(one.room + 20, most_silent)
        silent = [socket.create_connection(("127.0.0.1", one.port)) for _ in range(count)]
        # Slow ones.
        for sock in silent[-5:]:
            with contextlib.suppress(OSError):
                sock.send(MAGIC[:3])
        one.serve_peer()
        until(lambda: descriptors() <= open_before + len(silent) + one.room)
        attack(one.port, data, min(1.0, seconds), draw)
        before, memory = objects(), mebibytes()
        count = attack(one.port, data, seconds, draw)
        if seconds > 1.0:  # In less time not all places for connections are taken before.
            assert objects() - before < OBJECTS and mebibytes() - memory < MEBIBYTES, count
        one.serve_peer()
        until(lambda: threading.active_count() <= threads + one.threads)
        for sock in silent:
            sock.close()
        until(lambda: threading.active_count() <= threads and descriptors() <= open_before)
        one.serve_peer()
        written = "".join(capfd.readouterr())
        elapsed = time.monotonic() - start
    lines = [line for line in written.splitlines() if line and line != "a worker's line"]
    dropped = [line for line in lines if "dropped" in line]
    assert len(dropped) <= LINES + elapsed / SECONDS
    others = [line for line in lines if line not in dropped]
    assert not [line for line in others if not re.search("disconnected while|waiting for", line)]
    assert len(others) <= MORE_LINES + elapsed / SECONDS
    assert SECRET not in re.findall(r"'(\w+)'", written)
