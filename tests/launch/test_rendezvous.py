"""What the hosts tell one another before the start: messages and rejections, as tables."""

from __future__ import annotations

import json
import socket

import pytest

from tfdist.launch.hosts.auth import AuthClient, AuthServer
from tfdist.launch.hosts.channel import Channel, ChannelError, ProtocolError
from tfdist.launch.hosts.host_info import HostInfo, rejection, unreachable, worker_addresses

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
    text = b'{"a": 1}\n{"b": [1, 2]}\n'
    got = []
    for byte in text:
        ends[1].sendall(bytes([byte]))
        got += channel.receive()
    assert got == [{"a": 1}, {"b": [1, 2]}]
    Channel(ends[1]).send({"c": "ü\n"})
    assert channel.receive() == [{"c": "ü\n"}]


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\xff\n",
        b"[1]\n",
        b"3\n",
        b"\n",
        b"[" * 100_000 + b"\n",
        b"x" * 2_000_000,
    ],
)
def test_garbage_is_a_stranger(ends, data):
    channel = Channel(ends[0])
    ends[1].setblocking(False)
    with pytest.raises(ProtocolError):
        for _ in range(100):
            data = data[ends[1].send(data) if data else 0 :]
            channel.receive()


def test_the_end_of_a_connection(ends):
    channel = Channel(ends[0])
    ends[1].close()
    with pytest.raises(ChannelError, match="closed"):
        channel.receive()
    with pytest.raises(ChannelError, match="lost"):
        for _ in range(10):
            channel.send({"a": 1})


def test_a_hello_goes_over_the_wire():
    hello = HostInfo(1, 2, "10.0.0.2", (4000, 4001))
    assert HostInfo.from_message(json.loads(json.dumps(hello.to_message()))) == hello


@pytest.mark.parametrize(
    "change",
    [
        {"number": "one"},
        {"number": None},
        {"ports": []},
        {"ports": [0]},
        {"ports": [70000]},
        {"ports": ["x"]},
        {"ports": 4000},
        {"ports": [1] * 5000},
        {"address": "a b"},
        {"address": "x" * 300},
    ],
)
def test_no_hello(change):
    message = {"hello": {**MINE.to_message()["hello"], **change}}
    with pytest.raises(ValueError):
        HostInfo.from_message(message)
    for other in ({}, {"hello": 3}, {"hello": {}}):
        with pytest.raises(ValueError):
            HostInfo.from_message(other)


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
def test_rejections(newcomer, problem):
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


def test_both_ends_prove_the_secret():
    hello = HostInfo(1, 3, "", (4000,))
    for one, two in (("", ""), ("s", "s"), ("s", "t"), ("", "t")):
        client, server = AuthClient(hello, one), AuthServer(0.0)
        over_the_wire = json.loads(json.dumps(client.hello))
        proof = client.answer(json.loads(json.dumps(server.challenge(over_the_wire))))
        assert server.host == hello
        answer = server.accept(proof, two)
        assert (answer is not None) == (one == two)
        if answer:
            assert client.trusts(answer["proof"])
            assert not client.trusts(proof["proof"])
        assert AuthServer(0.0).accept(proof, one) is None
        assert not AuthClient(hello, one).trusts(proof["proof"])


def test_a_hello_without_a_challenge():
    with pytest.raises(ValueError, match="challenge"):
        AuthServer(0.0).challenge(MINE.to_message())
