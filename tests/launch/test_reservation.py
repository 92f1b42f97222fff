"""Reserved ports: the worker gets them, nobody else does."""

from __future__ import annotations

import errno
import socket

import pytest

from tfdist._src.launch.job import ports
from tfdist._src.launch.job.ports import Reservation

# How servers listen: gRPC on every address of both families, others on one.
LISTENERS = [
    (socket.AF_INET, "127.0.0.1"),
    (socket.AF_INET, "0.0.0.0"),
    (socket.AF_INET6, "::"),
    (socket.AF_INET6, "::1"),
]


def bind(family, address, port, *, reuse=False, reuse_port=False):
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if reuse:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
    except OSError:
        sock.close()
        raise
    return sock


def test_ports_are_distinct():
    with Reservation(50) as reservation:
        assert len(set(reservation.ports)) == 50


@pytest.mark.parametrize(("family", "address"), LISTENERS)
def test_another_program_does_not_get_a_reserved_port(family, address):
    with Reservation(1) as reservation, pytest.raises(OSError) as refused:
        bind(family, address, reservation.ports[0])
    assert refused.value.errno == errno.EADDRINUSE


@pytest.mark.parametrize("reuse_port", [False, True])
@pytest.mark.parametrize(("family", "address"), LISTENERS)
def test_the_worker_can_listen(family, address, reuse_port):
    """With SO_REUSEADDR, and with both options as gRPC sets them."""
    with Reservation(1) as reservation:
        port = reservation.ports[0]
        with bind(family, address, port, reuse=True, reuse_port=reuse_port) as server:
            server.listen()
            dialled = "::1" if family == socket.AF_INET6 else "127.0.0.1"
            with socket.create_connection((dialled, port), 5):
                server.accept()[0].close()


def test_before_the_worker_listens_a_connection_is_refused():
    with Reservation(1) as reservation, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", reservation.ports[0]), 5)


def test_any_free_port_is_never_a_reserved_one():
    with Reservation(200) as reservation:
        held = set(reservation.ports)
        for reuse in (False, True):
            for _ in range(2000):
                with bind(socket.AF_INET, "127.0.0.1", 0, reuse=reuse) as sock:
                    assert sock.getsockname()[1] not in held


def test_closing_gives_the_ports_back():
    with Reservation(1) as reservation:
        port = reservation.ports[0]
    bind(socket.AF_INET, "127.0.0.1", port).close()


def test_a_port_to_avoid(monkeypatch):
    sockets = [ports._hold_any() for _ in range(3)]
    numbers = [sock.getsockname()[1] for sock in sockets]
    monkeypatch.setattr(ports, "_hold_any", lambda: sockets.pop(0))
    with Reservation(2, avoid=numbers[0]) as reservation:
        assert list(reservation.ports) == numbers[1:]


def test_without_ipv6(monkeypatch):
    hold = ports._hold

    def no_ipv6(family, address):
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "no IPv6")
        return hold(family, address)

    monkeypatch.setattr(ports, "_hold", no_ipv6)
    with Reservation(1) as reservation, pytest.raises(OSError):
        bind(socket.AF_INET, "127.0.0.1", reservation.ports[0])
