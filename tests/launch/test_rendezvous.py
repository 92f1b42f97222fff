"""What the hosts tell one another before the start: messages and rejections, as tables."""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from dataclasses import asdict, replace

import pytest

from tests.certificates import variables
from tests.harness.deadlines import FAR
from tfdist._src.cluster.auth.handshake import handshake
from tfdist._src.cluster.auth.identity import JOIN, LAUNCH, Identity
from tfdist._src.cluster.net.framing import encode
from tfdist._src.cluster.net.tls import Tls
from tfdist._src.launch.hosts.newcomers import (
    Channel,
    ChannelError,
    HostInfo,
    Newcomers,
    rejection,
    screen,
    unreachable,
    worker_addresses,
)
from tfdist._src.options import Options
from tfdist.errors import ClusterError

MINE = HostInfo(0, 3, "", (4000, 4001))


@pytest.fixture
def ends():
    """Two channels' sockets, connected."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        two, _ = server.accept()
        yield one, two
        one.close()
        two.close()


def test_messages_arrive_whole_however_they_are_cut(ends):
    channel = Channel(ends[0])
    got = []
    for byte in encode({"kind": "a", "value": 1}) + encode({"kind": "b", "value": [1, 2]}):
        ends[1].sendall(bytes([byte]))
        got += channel.receive()
    assert got == [("a", 1), ("b", [1, 2])]
    Channel(ends[1]).send("c", "ü\n")
    assert channel.receive() == [("c", "ü\n")]


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0\0\0\1\0\0\0\0[",
        b"\0\0\0\3\0\0\0\0[1]",
        encode({"kind": "x"}).replace(b"kind", b"what"),
        b"\0\x20\0\0\0\0\0\0",
        b"\0\1\0\0\0\0\0\0" + b"[" * (1 << 16),
    ],
)
def test_what_is_no_message_ends_the_connection(ends, data):
    channel = Channel(ends[0])
    ends[1].setblocking(False)
    with pytest.raises(ChannelError):
        for _ in range(100):
            data = data[ends[1].send(data) if data else 0 :]
            channel.receive()


def test_the_end_of_a_connection(ends):
    channel = Channel(ends[0])
    ends[1].close()
    with pytest.raises(ChannelError, match="closed"):
        channel.receive()
    for _ in range(10):
        channel.send("a")


def test_one_that_does_not_read_is_lost(ends, monkeypatch):
    monkeypatch.setattr("tfdist._src.launch.hosts.newcomers._SEND_SECONDS", 0.05)
    ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    ends[1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    channel = Channel(ends[0])
    for _ in range(3):
        channel.send("a", "x" * 1_000_000)
    with pytest.raises(ChannelError):
        channel.receive()


HELLO = Identity.of_other("host 0", LAUNCH)


def test_a_host_goes_over_the_wire():
    sent = json.loads(json.dumps(asdict(MINE)))
    assert HostInfo.received(sent, HELLO) == MINE
    # Of another version, nothing else is read.
    other = HostInfo.received({"what": "else"}, replace(HELLO, version="9"))
    assert (other.number, other.version) == (0, "9")


@pytest.mark.parametrize(
    "change",
    [
        {"number": "one"},
        {"number": None},
        {"number": float("inf")},
        {"number": 0.0},
        {"number": True},
        {"number": 1},
        {"num_hosts": 1e400},
        {"ports": []},
        {"ports": [0]},
        {"ports": [70000]},
        {"ports": [4000.0]},
        {"ports": ["x"]},
        {"ports": 4000},
        {"ports": [1] * 5000},
        {"address": "a b"},
        {"address": "x" * 300},
        {"elastic": 1},
        {"version": "0"},
        {"more": 1},
    ],
)
def test_what_describes_no_host_is_refused(change):
    value = {**asdict(MINE), "ports": [4000, 4001], **change}
    with pytest.raises(ValueError):
        HostInfo.received(value, HELLO)


@pytest.mark.parametrize("value", [None, 3, {}, [], "host"])
def test_no_host_at_all(value):
    with pytest.raises(ValueError):
        HostInfo.received(value, HELLO)


@pytest.mark.parametrize(
    ("newcomer", "problem"),
    [
        (HostInfo(2, 3, "", (1,)), ""),
        (HostInfo(2, 4, "", (1,)), "host 2 (10.0.0.9) was started with --nnodes 4, host 0 with"),
        (
            HostInfo(1, 3, "", (1,)),
            "two hosts were started with --node-rank 1: 10.0.0.2 and 10.0.0.9",
        ),
        (
            HostInfo(0, 3, "", (1,)),
            "two hosts were started with --node-rank 0: 10.0.0.1 and 10.0.0.9",
        ),
        (HostInfo(7, 3, "", (1,)), "host 7 (10.0.0.9) must have a --node-rank from 1 to 2"),
        (HostInfo(2, 3, "", (1,), version="0"), "host 2 (10.0.0.9) has tfdist 0, host 0 has"),
    ],
)
def test_newcomers_that_do_not_fit_are_rejected(newcomer, problem):
    said = rejection(newcomer, "10.0.0.9", MINE, {0: "10.0.0.1", 1: "10.0.0.2"})
    assert said.startswith(problem) and bool(said) == bool(problem)
    assert "\n" not in said


@pytest.mark.parametrize(
    ("addresses", "problem"),
    [
        ({0: "10.0.0.1", 1: "10.0.0.2"}, ""),
        ({0: "127.0.0.1", 1: "127.0.0.1"}, ""),
        ({0: "127.0.0.1", 1: "::1", 2: "localhost"}, ""),
        ({0: "10.0.0.1", 1: "127.0.1.1"}, "host 1 would be reached at 127.0.1.1"),
        ({0: "localhost", 1: "host1"}, "host 0 would be reached at localhost"),
    ],
)
def test_addresses_that_others_cannot_reach(addresses, problem):
    said = unreachable(addresses)
    assert said.startswith(problem) and bool(said) == bool(problem)


def test_workers_in_the_order_of_hosts():
    hosts = {2: ("c", (1,)), 0: ("fd00::1", (2, 3)), 1: ("10.0.0.1", (4,))}
    assert worker_addresses(hosts) == ["[fd00::1]:2", "[fd00::1]:3", "10.0.0.1:4", "c:1"]


@pytest.fixture
def listening():
    """Listens as host 0 of three in a thread; gives the port, and who has arrived."""
    ended, threads = threading.Event(), []

    def start(secret="", tls=None):
        server = socket.create_server(("127.0.0.1", 0))
        newcomers, arrived = Newcomers(server, 3, secret, tls), []

        def serve():
            while not ended.is_set():
                select.select([newcomers], [], [], 0.01)
                arrived.extend(newcomers.take())
            newcomers.close()

        threads.append(threading.Thread(target=serve))
        threads[-1].start()
        return server.getsockname()[1], arrived

    yield start
    ended.set()
    for thread in threads:
        thread.join()


def hello(port, secret="", tls=None, number=1, purpose=LAUNCH):
    """A launcher's connection, authenticated."""
    mine = Identity.of_other(f"host {number}", purpose, number)
    sock = socket.create_connection(("127.0.0.1", port))
    try:
        sock = tls.wrap(sock, dialed=True) if tls else sock
        until = time.monotonic() + FAR
        handshake(sock, mine, secret, until, first=True, admit=screen, name="host 0")
        return Channel(sock)
    except BaseException:
        sock.close()
        raise


def until(condition):
    while not condition():
        time.sleep(0.005)


@pytest.mark.parametrize("secure", [False, True])
def test_a_launcher_arrives(listening, secure):
    tls = Tls.load(Options.from_environment(variables())) if secure else None
    port, arrived = listening("s", tls)
    channel = hello(port, "s", tls)
    host = HostInfo(1, 3, "", (4000,))
    channel.send("host", asdict(host))
    until(lambda: arrived)
    ((found, other),) = arrived
    assert found == host and other.port
    other.send("waiting", [2])
    until(lambda: select.select([channel], [], [], 0)[0])
    assert channel.receive() == [("waiting", [2])]
    channel.close()
    other.close()


@pytest.mark.parametrize(("right", "wrong"), [("s", "t"), ("s", ""), ("", "t")])
def test_a_launcher_with_another_secret(listening, caplog, right, wrong):
    port, arrived = listening(right)
    with pytest.raises(ClusterError, match="Set the same TFDIST_SECRET on all hosts"):
        hello(port, wrong)
    assert not arrived
    until(lambda: caplog.messages)
    assert caplog.messages[0].startswith("dropped a connection from 127.0.0.1:")


def test_what_is_no_launcher(listening):
    port, arrived = listening()
    with pytest.raises(ConnectionError):
        hello(port, purpose=JOIN)
    for kind, value in [("host", {"number": float("inf")}), ("stop", None), ("host", None)]:
        channel = hello(port)
        channel.send(kind, value)
        until(lambda channel=channel: select.select([channel], [], [], 0)[0])
        with pytest.raises(ChannelError, match="closed"):
            channel.receive()
        channel.close()
    assert not arrived


def test_launchers_that_do_not_describe_their_hosts(listening, monkeypatch):
    monkeypatch.setattr("tfdist._src.launch.hosts.newcomers._STRANGERS", 1)
    port, arrived = listening()
    silent = [hello(port, number=number) for number in range(6)]
    for channel in silent[:2]:  # there is room for four
        until(lambda channel=channel: select.select([channel], [], [], 0)[0])
        channel.close()
    silent[5].send("host", asdict(HostInfo(5, 3, "", (4000,))))
    until(lambda: arrived)
    for channel in (*silent[2:], arrived[0][1]):
        channel.close()
