"""Strangers that connect to a member do not delay the connection of a group."""

import socket
import struct
import threading
import time

import pytest

from tests.harness.deadlines import FAR
from tests.harness.tiers import exhaustive
from tfdist._src.cluster import Topology
from tfdist._src.cluster.auth.handshake import MAGIC, handshake
from tfdist._src.cluster.auth.identity import Identity
from tfdist._src.cluster.cluster_spec import Worker
from tfdist._src.cluster.net.framing import encode

BODY = """
from tfdist._src.cluster.rendezvous.acceptor import Rejections
# A line for each.
Rejections.add = lambda self, address, peer, reason, now: self._announce(
    f"dropped a connection from {peer}: {reason}"
)
from tfdist._src.cluster.rendezvous import acceptor
acceptor.ACCEPT_SECONDS = float(os.environ["HELLO_SECONDS"])
before = descriptors()
go = Path(os.environ["GO"])
if rank == 0:
    go.with_name("met").touch()
if rank == 1:
    from tfdist._src.cluster.rendezvous import connector
    look_up_now = connector.dial_endpoints
    def look_up_then(*args):
        while not go.exists():
            time.sleep(0.01)
        return look_up_now(*args)
    connector.dial_endpoints = look_up_then
mesh = connect_mesh([0, 1])
check(mesh, [0, 1], [0, 1])
mesh.close()
report(same=nothing_left(before), lines=lines)
"""


class Stranger(threading.Thread):
    """Dials rank 0 and runs a function on the connection, until it is dropped."""

    def __init__(self, sock, act):
        super().__init__(daemon=True)
        self.sock, self.act = sock, act
        self.port = sock.getsockname()[1]
        self.start()

    def run(self):
        with self.sock:
            self.sock.settimeout(FAR)
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
    hello = Identity.of(topology, purpose)
    handshake(sock, hello, secret, time.monotonic() + FAR, first=True)


ACTS = {
    "does not speak tfdist's protocol": lambda sock: sock.sendall(b"GET / HTTP/1.1\r\n\r\n"),
    "are allowed": lambda sock: sock.sendall(MAGIC + b"\xff" * 8),
    "no hello": lambda sock: sock.sendall(MAGIC + encode({"kind": "hello"})),
    "connection closed": lambda sock: sock.shutdown(socket.SHUT_WR),
    "does not have the secret": other_secret,
    "which is not expected here": another_purpose,
    "'join', which is not": a_late_worker,
}


@pytest.fixture
def visited(run, dial, until, tmp_path):
    """A group of two, with strangers that connect to rank 0 first.

    Rank 1 connects after `what` returns; each handshake may take `seconds`.
    """

    def start(acts, what=lambda strangers: None, seconds=FAR):
        def outside(cluster):
            """Connects once rank 0 listens again, at the address of the rendezvous."""
            until(lambda: (tmp_path / "met").exists())
            WORKERS[:] = [Worker("worker", n, address) for n, address in enumerate(cluster)]
            strangers.extend(Stranger(dial(cluster[0]), act) for act in acts)
            what(strangers)
            (tmp_path / "go").touch()

        strangers = []
        environment = {
            "GO": str(tmp_path / "go"),
            "HELLO_SECONDS": str(seconds),
            "TFDIST_SECRET": "right",
        }
        found = run(2, BODY, hosts="ab", outside=outside, **environment)
        ended(strangers)
        return found, strangers

    return start


def ended(strangers):
    for stranger in strangers:
        stranger.join()


def test_strangers_that_connect_first(visited):
    found, strangers = visited(list(ACTS.values()), ended)
    for one in found:
        assert one["same"], found
    for part, stranger in zip(ACTS, strangers, strict=True):
        line = f"dropped a connection from 127.0.0.1:{stranger.port}: "
        (said,) = [text for text in found[0]["lines"] if line in text]
        assert part in said
    assert not any("wrong" in line or "right" in line for line in found[0]["lines"])


def test_silent_and_slow_strangers_are_not_waited_for(visited):
    found, _ = visited([slow, slow, lambda sock: None, lambda sock: sock.sendall(MAGIC[:4])] * 3)
    for one in found:
        assert one["same"], found


@exhaustive
def test_a_crowd_of_strangers_does_not_delay_a_group(visited):
    """More than are accepted at once."""
    found, _ = visited([lambda sock: None] * 300, seconds=2.0)
    for one in found:
        assert one["same"], found
