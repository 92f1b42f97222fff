"""Strangers that connect to rank 0 do not delay the job."""

import contextlib
import functools
import selectors
import socket
import threading
import time

from tests.harness.deadlines import FAR
from tfdist._src.cluster.auth.handshake import MAGIC, handshake
from tfdist._src.cluster.auth.identity import JOIN, Identity
from tfdist._src.cluster.rendezvous.acceptor import Acceptor
from tfdist.errors import RendezvousError


def answer(sock):
    try:
        return sock.recv(4096)
    except ConnectionResetError:  # closed before everything sent was read
        return b""


def test_strangers_do_not_stop_the_job(addresses, attempt, monkeypatch, dial):
    monkeypatch.setattr("tfdist._src.cluster.rendezvous.acceptor.ACCEPT_SECONDS", FAR)
    cluster = addresses(3)
    group = [attempt(cluster, 0), attempt(cluster, 1)]
    strangers = [dial(cluster[0]) for _ in range(5)]
    _silent, web, halting, huge, gone = strangers
    web.sendall(b"GET / HTTP/1.1\r\n\r\n")
    halting.sendall(MAGIC + b"\0\0")
    huge.sendall(MAGIC + b"\xff" * 8)
    gone.close()
    for one in (web, huge):
        assert answer(one) == b""  # dropped at once, without an answer
    group.append(attempt(cluster, 2))
    for one in group:
        one.met()  # the silent ones did not delay them
    # The first is reported at once, the others together.
    dropped = [line for line in group[0].lines if "dropped" in line]
    assert len(dropped) == 2
    assert "dropped a connection from 127.0.0.1:" in dropped[0]
    assert "dropped 2 more connections from 127.0.0.1; the last: " in dropped[1]
    for one in strangers:
        one.close()


def test_slow_stranger_is_dropped(addresses, attempt, monkeypatch, dial):
    monkeypatch.setattr("tfdist._src.cluster.rendezvous.acceptor.ACCEPT_SECONDS", 0.3)
    cluster = addresses(2)
    coordinator = attempt(cluster, 0)
    with dial(cluster[0]) as slow:
        with contextlib.suppress(OSError):  # a slow machine drops it in between
            for byte in MAGIC[:6]:
                slow.sendall(bytes([byte]))
                time.sleep(0.03)
        assert answer(slow) == b""
    attempt(cluster, 1).met()
    coordinator.met()
    assert any("silent or too slow" in line for line in coordinator.lines)


def test_more_strangers_than_are_accepted_at_once(addresses, attempt, monkeypatch, dial):
    monkeypatch.setattr("tfdist._src.cluster.rendezvous.acceptor._MAX_STRANGERS", 0)
    monkeypatch.setattr("tfdist._src.cluster.rendezvous.acceptor.ACCEPT_SECONDS", 0.5)
    cluster = addresses(2)
    coordinator = attempt(cluster, 0)
    strangers = [dial(cluster[0]) for _ in range(10)]
    worker = attempt(cluster, 1)
    for one in (coordinator, worker):
        one.met()
    for one in strangers:
        one.close()


def test_something_else_at_rank_0(addresses, attempt):
    cluster = addresses(2)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", int(cluster[0].rpartition(":")[2])))
        other.listen()
        worker = attempt(cluster, 1, start_timeout=1.5)
        with other.accept()[0] as accepted:
            accepted.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            error = worker.failed()
    assert isinstance(error, RendezvousError)
    assert f"worker 0 ({cluster[0]}), which" in str(error)


def test_an_error_that_nobody_foresees_ends_one_connection():
    lines, accepted = [], []

    def screen(hello):
        if hello.rank == 1:
            raise ZeroDivisionError("that one")

    def dial(rank):
        mine = Identity.of_other("a", JOIN, rank)
        with socket.create_connection(listener.getsockname()) as sock, contextlib.suppress(OSError):
            handshake(sock, mine, "s", time.monotonic() + FAR, first=True)

    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        selectors.DefaultSelector() as selector,
    ):
        listener.setblocking(False)
        mine = Identity.of_other("b", JOIN)
        take = lambda sock, hello: accepted.append((sock, hello.rank))  # noqa: E731
        acceptor = Acceptor(selector, mine, "s", None, 4, screen, take, lines.append)
        accept = functools.partial(acceptor.accept, listener)
        selector.register(listener, selectors.EVENT_READ, accept)
        threads = [threading.Thread(target=dial, args=[rank]) for rank in (1, 2)]
        for thread in threads:
            thread.start()
        while not (lines and accepted):
            for key, _ in selector.select(0.1):
                key.data()
            acceptor.tick()
        acceptor.close()
        ((sock, rank),) = accepted
        sock.close()
        for thread in threads:
            thread.join()
    assert rank == 2
    (line,) = lines
    assert "it caused an unexpected error: ZeroDivisionError('that one')" in line


def test_a_flood_does_not_keep_the_caller(monkeypatch):
    monkeypatch.setattr("tfdist._src.cluster.rendezvous.acceptor._AT_ONCE", 3)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        selectors.DefaultSelector() as selector,
    ):
        listener.setblocking(False)
        ends = [socket.create_connection(listener.getsockname()) for _ in range(10)]
        nobody = lambda *given: None  # noqa: E731
        acceptor = Acceptor(
            selector, Identity.of_other("b", JOIN), "s", None, 4, nobody, nobody, nobody
        )
        found = []
        for _ in range(4):
            acceptor.accept(listener)
            found.append(len(selector.get_map()))
        assert found == [3, 6, 9, 10] and acceptor.is_busy
        acceptor.close()
        for sock in ends:
            sock.close()
