"""One thread accepts and dials many connections at the same time."""

import selectors
import socket
import threading
import time
from functools import partial

import pytest

from tests.harness.deadlines import FAR
from tfdist._src.cluster import Topology, Worker
from tfdist._src.cluster.auth.handshake import handshake
from tfdist._src.cluster.auth.identity import Identity
from tfdist._src.cluster.net.framing import WireError
from tfdist._src.cluster.rendezvous import connector
from tfdist._src.cluster.rendezvous.acceptor import Acceptor
from tfdist._src.cluster.rendezvous.connector import Connector, Target
from tfdist.errors import ClusterError

WORKERS = tuple(Worker("worker", rank, f"127.0.0.1:{rank + 1}") for rank in range(2))


class Loop:
    """Dials from rank 1 to rank 0, whose listener is in the same thread."""

    def __init__(self, secret="right"):
        self.selector = selectors.DefaultSelector()
        self.woken = threading.Event()
        self.connector = Connector(self.selector, "right", None, self.woken.set)
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.listener.setblocking(False)
        self.port = self.listener.getsockname()[1]
        self.hellos, self.opened, self.connected, self.failures = [], [], [], []
        self.refuse = False
        self.acceptor = Acceptor(
            self.selector,
            Identity.of(Topology(WORKERS, 0, "worker", 0)),
            secret,
            None,
            100,
            self.screen,
            lambda sock, hello: (self.hellos.append(hello), sock.close()),
            lambda line: None,
        )
        accept = partial(self.acceptor.accept, self.listener)
        self.selector.register(self.listener, selectors.EVENT_READ, accept)

    def screen(self, hello):
        if self.refuse:
            self.refuse = False
            raise WireError("not now")

    def target(self, address):
        return Target(
            name="rank 0",
            address=address,
            ports=None,
            hello=Identity.of(Topology(WORKERS, 1, "worker", 1)),
            screen=lambda hello: None,
            on_opened=lambda: self.opened.append(address),
            on_connected=lambda sock: (self.connected.append(sock), sock.close()),
            on_failed=self.failures.append,
        )

    def dial(self, *addresses):
        self.connector.start([self.target(address) for address in addresses])

    def run(self, done):
        """Serves all connections until `done()`."""
        deadline = time.monotonic() + FAR
        while not done():
            assert time.monotonic() < deadline
            self.connector.begin_due()
            for key, _ in self.selector.select(self.connector.seconds_left(0.02)):
                key.data()
            self.connector.tick()
            self.acceptor.tick()

    def close(self):
        self.connector.close()
        self.acceptor.close()
        left = [key.fileobj for key in self.selector.get_map().values()]
        self.selector.close()
        self.listener.close()
        assert left == [self.listener]


@pytest.fixture
def loop():
    made = Loop()
    yield made
    made.close()


def test_more_than_are_opened_at_once(loop):
    many = 3 * connector._MAX_AT_ONCE
    loop.dial(*[f"127.0.0.1:{loop.port}"] * many)
    loop.run(lambda: len(loop.connected) == len(loop.hellos) == many)
    assert not loop.failures
    assert {hello.attempt for hello in loop.hellos} == {0}


def test_names_are_looked_up_elsewhere(loop, monkeypatch):
    """A name service that hangs delays no connection whose address is known."""
    answer = threading.Event()
    threads = []

    def look_up(address, ports):
        threads.append(threading.current_thread())
        if address.startswith("slow"):
            assert answer.wait(FAR)
        return [(socket.AF_INET, ("127.0.0.1", loop.port))]

    monkeypatch.setattr(connector, "dial_endpoints", look_up)
    loop.dial("slow:1", f"127.0.0.1:{loop.port}")
    loop.run(lambda: len(loop.connected) == 1)
    assert not loop.woken.is_set()
    answer.set()
    loop.run(lambda: len(loop.connected) == 2)
    assert loop.woken.is_set()
    assert len({thread is threading.current_thread() for thread in threads}) == 2


def test_a_name_that_does_not_resolve_is_looked_up_again(loop, monkeypatch):
    answers = [OSError("it does not resolve"), None]

    def look_up(address, ports):
        if error := answers.pop(0):
            raise error
        return [(socket.AF_INET, ("127.0.0.1", loop.port))]

    monkeypatch.setattr(connector, "dial_endpoints", look_up)
    loop.dial("name:1")
    loop.run(lambda: loop.connected and loop.hellos)
    assert [str(error) for error in loop.failures] == ["it does not resolve"]


def test_nothing_listens_at_first(loop):
    with socket.create_server(("127.0.0.1", 0)) as late:
        port = late.getsockname()[1]
    loop.dial(f"127.0.0.1:{port}")
    loop.run(lambda: len(loop.failures) == 2)
    assert all(isinstance(error, ConnectionRefusedError) for error in loop.failures)
    with socket.create_server(("127.0.0.1", port)) as late:
        late.setblocking(False)
        accept = partial(loop.acceptor.accept, late)
        loop.selector.register(late, selectors.EVENT_READ, accept)
        loop.run(lambda: loop.connected and loop.hellos)
        loop.selector.unregister(late)
    assert loop.hellos[0].attempt >= 2


def test_the_next_endpoint_is_tried(loop, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    endpoints = [(socket.AF_INET, ("127.0.0.1", one)) for one in (port, loop.port)]
    monkeypatch.setattr(connector, "dial_endpoints", lambda address, ports: endpoints)
    loop.dial("127.0.0.1:1")
    loop.run(lambda: loop.connected and loop.hellos)
    assert not loop.failures


def test_a_peer_that_refuses_is_asked_again(loop):
    loop.refuse = True
    loop.dial(f"127.0.0.1:{loop.port}")
    loop.run(lambda: loop.connected and loop.hellos)
    assert len(loop.failures) == 1
    assert [hello.attempt for hello in loop.hellos] == [1]


def test_silent_peers_delay_no_other(loop, monkeypatch):
    """They accept, and say nothing: they are given up, and dialed again after the others."""
    monkeypatch.setattr(connector, "_HANDSHAKE_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0), backlog=512) as silent:
        port = silent.getsockname()[1]
        several = connector._MAX_AT_ONCE + 4
        loop.dial(*[f"127.0.0.1:{port}"] * several, f"127.0.0.1:{loop.port}")
        loop.run(lambda: loop.connected and loop.hellos)
        assert all(isinstance(error, TimeoutError) for error in loop.failures)
        loop.connector.close()


def test_another_secret_is_final():
    loop = Loop(secret="wrong")
    try:
        loop.dial(f"127.0.0.1:{loop.port}")
        loop.run(lambda: loop.failures)
        assert isinstance(loop.failures[0], ClusterError)
        loop.run(lambda: loop.connector.seconds_left(7.0) == 7.0)
        assert len(loop.failures) == 1 and not loop.connected
    finally:
        loop.close()


def test_nothing_follows_a_handshake(loop):
    """What a dialer sends before it is accepted must not be lost between two readers."""

    class Hasty(socket.socket):
        def sendall(self, data):
            super().sendall(data + (b"more" if b'"proof"' in data else b""))

    ended = []

    def dial():
        with Hasty() as sock:
            sock.connect(("127.0.0.1", loop.port))
            mine = Identity.of(Topology(WORKERS, 1, "worker", 1))
            handshake(sock, mine, "right", time.monotonic() + FAR, first=True)
            ended.append(sock.recv(1))

    dialer = threading.Thread(target=dial, daemon=True)
    dialer.start()
    loop.run(lambda: not dialer.is_alive())
    assert ended == [b""]
    assert not loop.hellos


def test_closing_in_the_middle(loop):
    """Connections that are being opened, are shaking hands, or wait for their turn."""
    loop.dial(*[f"127.0.0.1:{loop.port}"] * (2 * connector._MAX_AT_ONCE))
    loop.connector.begin_due()
    for key, _ in loop.selector.select(FAR):
        key.data()
