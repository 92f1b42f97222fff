"""Strangers who come to a member while a group is connected do not hold it up."""

import socket
import struct
import threading
import time

import pytest

from tfdist.cluster import Topology
from tfdist.cluster.handshake import MAGIC, handshake
from tfdist.cluster.hello import Hello
from tfdist.cluster.topology import Worker
from tfdist.cluster.wire import encode

pytestmark = pytest.mark.timeout(60)

BODY = """
before = settled()
go = Path(os.environ["GO"])
if rank == 0:
    go.with_name("met").touch()
while rank == 1 and not go.exists():
    time.sleep(0.01)
mesh = weave([0, 1])
seconds = time.time() - go.stat().st_mtime
check(mesh, [0, 1], [0, 1])
mesh.close()
report(same=settled() == before, lines=lines, seconds=seconds)
"""


class Stranger(threading.Thread):
    """Something that dials rank 0 and does what a function says, until it is dropped."""

    def __init__(self, sock, act):
        super().__init__(daemon=True)
        self.sock, self.act = sock, act
        self.port = sock.getsockname()[1]
        self.start()

    def run(self):
        with self.sock:
            self.sock.settimeout(10)
            try:
                self.act(self.sock)
                while self.sock.recv(4096):
                    pass
            except (OSError, ValueError):
                pass


def slow(sock):
    for byte in MAGIC + struct.pack("!II", 1000, 0) + b" " * 1000:
        sock.sendall(bytes([byte]))
        time.sleep(0.05)


def other_secret(sock):
    shake(sock, "wrong", "mesh 0123456789abcdef control 1>0")


def another_purpose(sock):
    shake(sock, "right", "mesh 0123456789abcdef control 1>0")


def a_late_worker(sock):
    shake(sock, "right", "join")


WORKERS = []


def shake(sock, secret, purpose):
    topology = Topology(tuple(WORKERS), 1, "worker", 1)
    hello = Hello.of(topology, purpose)
    handshake(sock, hello, secret, time.monotonic() + 10, first=True)


ACTS = {
    "no tfdist worker": lambda sock: sock.sendall(b"GET / HTTP/1.1\r\n\r\n"),
    "are allowed": lambda sock: sock.sendall(MAGIC + b"\xff" * 8),
    "no hello": lambda sock: sock.sendall(MAGIC + encode({"kind": "hello"})),
    "connection closed": lambda sock: sock.shutdown(socket.SHUT_WR),
    "does not hold the secret": other_secret,
    "which is not awaited here": another_purpose,
    "'join', which is not": a_late_worker,
}


@pytest.fixture
def visited(run, dial, until, tmp_path):
    """A group of two of which rank 0 is visited by strangers first."""

    def start(acts):
        def outside(places):
            """Comes once rank 0 awaits the others again, at the address where they met."""
            until(lambda: (tmp_path / "met").exists())
            WORKERS[:] = [Worker("worker", n, place) for n, place in enumerate(places)]
            strangers.extend(Stranger(dial(places[0]), act) for act in acts)
            time.sleep(0.3)
            (tmp_path / "go").touch()

        strangers = []
        environment = {"GO": str(tmp_path / "go"), "TFDIST_SECRET": "right"}
        found = run(2, BODY, hosts="ab", outside=outside, **environment)
        for stranger in strangers:
            stranger.join(10)
            assert not stranger.is_alive()
        return found, strangers

    return start


def test_strangers_who_come_first(visited):
    found, strangers = visited(list(ACTS.values()))
    for one in found:
        assert one["same"] and one["seconds"] < 2, found
    for part, stranger in zip(ACTS, strangers, strict=True):
        line = f"dropped a connection from 127.0.0.1:{stranger.port}: "
        (said,) = [text for text in found[0]["lines"] if line in text]
        assert part in said
    assert not any("wrong" in line or "right" in line for line in found[0]["lines"])


def test_silent_and_slow_ones_are_left_behind(visited):
    found, _ = visited([slow, slow, lambda sock: None, lambda sock: sock.sendall(MAGIC[:4])] * 3)
    for one in found:
        assert one["same"] and one["seconds"] < 2, found


def test_very_many(visited):
    found, _ = visited([lambda sock: None] * 300)
    for one in found:
        assert one["same"] and one["seconds"] < 8, found
