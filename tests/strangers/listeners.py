"""Everything in the project that listens, each in this process, as strangers and peers see it."""

from __future__ import annotations

import contextlib
import importlib.util
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from urllib.request import urlopen

from prometheus_client import CollectorRegistry, make_wsgi_app

import tfdist
from tests.harness.deadlines import FAR
from tfdist._src.cluster import Session, Topology, Worker, meet, observe
from tfdist._src.cluster.auth.handshake import handshake
from tfdist._src.cluster.auth.identity import LAUNCH, OBSERVE, PRINT, REGROUP, Identity
from tfdist._src.cluster.membership.calls import Calls
from tfdist._src.cluster.membership.liveness import LivenessServer
from tfdist._src.cluster.membership.liveness import ask as inspect
from tfdist._src.cluster.membership.membership import Membership
from tfdist._src.cluster.membership.node import Node
from tfdist._src.cluster.observation import ask as ask_workers
from tfdist._src.launch.hosts.newcomers import Channel, HostInfo, Newcomers
from tfdist._src.launch.job.ports import Reservation
from tfdist._src.monitoring.server import MetricsServer
from tfdist._src.options import Options

SECRET = "s"
OPTIONS = Options(secret=SECRET, start_timeout=FAR)


@dataclass
class Listener:
    """Something that listens.

    Attributes:
        port: where, on 127.0.0.1.
        peer: an honest peer; None if it speaks another protocol.
        serve_peer: connects as an honest peer, and checks that it is served.
        room: connections of strangers that it may keep at a time.
        threads: threads that it may have for them.
    """

    port: int
    peer: Identity | None
    serve_peer: Callable[[], None]
    room: int
    threads: int = 0


@contextlib.contextmanager
def rendezvous() -> Iterator[Listener]:
    """Rank 0, which waits for two workers, of which one never comes while this is open."""
    with Reservation(3) as reservation:
        addresses = [f"127.0.0.1:{port}" for port in reservation.ports]
        sessions: list[Session] = []

        workers = tuple(Worker("worker", i, at) for i, at in enumerate(addresses))
        peer = Identity.of(Topology(workers, 1, "worker", 1))

        def join(rank: int) -> threading.Thread:
            topology = Topology(workers, rank, "worker", rank)
            thread = threading.Thread(
                target=lambda: sessions.append(meet(topology, OPTIONS, announce=print))
            )
            thread.start()
            return thread

        def serve_peer() -> None:
            dial(reservation.ports[0], peer).close()

        threads = [join(0)]
        until(lambda: listens(reservation.ports[0]))
        yield Listener(reservation.ports[0], peer, serve_peer, 300)
        threads += [join(1), join(2)]
        for thread in threads:
            thread.join()
        for session in sessions:
            session.close()


@contextlib.contextmanager
def running_job() -> Iterator[Listener]:
    """Rank 0 of a job that runs, which answers observers and those that would join."""
    with Reservation(2) as reservation, contextlib.ExitStack() as stack:
        addresses = [f"127.0.0.1:{port}" for port in reservation.ports]
        workers = tuple(Worker("worker", i, at) for i, at in enumerate(addresses))
        memberships: dict[int, Membership] = {}

        def begin(rank: int) -> None:
            session = meet(Topology(workers, rank, "worker", rank), OPTIONS, announce=print)
            session.report.made_by(lambda: {"rank": rank})
            memberships[rank] = Membership(session, OPTIONS, print)
            observe(session, OPTIONS, print)

        threads = [threading.Thread(target=begin, args=[rank]) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for membership in memberships.values():
            stack.callback(membership.session.close)
            stack.callback(membership.close)
        calls = Calls(Topology(workers, 1, "worker", 1), OPTIONS)

        def serve_peer() -> None:
            assert [one.report for one in ask_workers(addresses[0], OPTIONS)] == [
                {"rank": 0},
                {"rank": 1},
            ]
            assert calls.ask(addresses[0], {"kind": "inquire"}, FAR)["kind"] == "told"

        until(lambda: listens(reservation.ports[0]))
        yield Listener(reservation.ports[0], Identity.of_other("doctor", OBSERVE), serve_peer, 300)


@contextlib.contextmanager
def witness() -> Iterator[Listener]:
    """A launcher that tells the workers of other hosts who is dead."""
    with Reservation(1) as reservation:
        (port,) = reservation.ports
        one = LivenessServer(f"127.0.0.1:{port}", replace(OPTIONS, host="a"), print)
        you = Topology((Worker("worker", 0, "w:1"),))
        member = Node(you, Options(host="a")).member
        calls = Calls(you, OPTIONS)

        def serve_peer() -> None:
            assert not inspect(calls, f"127.0.0.1:{port}", member).dead

        with looping(one.fileno, one.serve):
            yield Listener(port, Identity.of(you, REGROUP), serve_peer, 300)
        one.close()


@contextlib.contextmanager
def launcher() -> Iterator[Listener]:
    """The launcher of host 0, which waits for another one."""
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    newcomers = Newcomers(server, 2, SECRET, None)
    arrived: list[tuple[HostInfo, Channel]] = []
    host, peer = HostInfo(1, 2, "", (4000,)), Identity.of_other("host 1", LAUNCH, 1)

    def serve_peer() -> None:
        with dial(port, peer) as sock:
            Channel(sock).send("host", asdict(host))
            until(lambda: arrived)
        found, channel = arrived.pop()
        channel.close()
        assert found == host

    with looping(newcomers.fileno, lambda: arrived.extend(newcomers.take())):
        yield Listener(port, peer, serve_peer, 100)
    newcomers.close()


@contextlib.contextmanager
def metrics() -> Iterator[Listener]:
    """A worker's metrics."""
    with Reservation(1) as reservation:
        (port,) = reservation.ports
        server = MetricsServer("127.0.0.1", port, make_wsgi_app(CollectorRegistry()))

        def serve_peer() -> None:
            with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=FAR) as answer:
                assert answer.status == 200

        yield Listener(port, None, serve_peer, 20, 20)
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def driver_log() -> Iterator[Listener]:
    """A driver of Spark, which prints what workers print."""
    module = driver_log_module()
    with module.DriverLog(SECRET, 1) as log:

        def serve_peer() -> None:
            client = module.DriverLogClient(("127.0.0.1", log.port), SECRET)
            client.send(b"a worker's line\n")
            client.close()

        yield Listener(log.port, Identity.of_other("a task", PRINT), serve_peer, 300)


def driver_log_module():  # type: ignore[no-untyped-def]
    """The module, also where there is no Spark."""
    path = Path(tfdist.__file__).parent / "_src" / "spark" / "driver_log.py"
    spec = importlib.util.spec_from_file_location("driver_log", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LISTENERS = (rendezvous, running_job, witness, launcher, metrics, driver_log)


@contextlib.contextmanager
def looping(fileno: Callable[[], int], serve: Callable[[], object]) -> Iterator[None]:
    """What a launcher's loop does, in a thread; fails if that ends before."""
    ended, failure = threading.Event(), []

    def loop() -> None:
        try:
            while not ended.is_set():
                select.select([fileno()], [], [], 0.02)
                serve()
        except BaseException as error:
            failure.append(error)
            raise

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert not failure


def dial(port: int, mine: Identity, secret: str = SECRET) -> socket.socket:
    """A connection after the handshake, which is tried until it succeeds."""
    end = time.monotonic() + FAR
    while True:
        sock = socket.create_connection(("127.0.0.1", port), FAR)
        try:
            handshake(sock, mine, secret, end, first=True)
            return sock
        except OSError:  # it has been displaced
            sock.close()


def listens(port: int) -> bool:
    """Whether somebody listens there."""
    with contextlib.suppress(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()
        return True
    return False


def until(condition: Callable[[], object]) -> None:
    """Waits for a condition."""
    while not condition():
        time.sleep(0.01)
