"""What the kernel allows on a port; the rendezvous and TensorFlow's server rely on it."""

import socket
import subprocess
import sys

import pytest

LISTEN = """
import socket, sys
family, host, port, only = sys.argv[1:]
sock = socket.socket(getattr(socket, family))
sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
if family == "AF_INET6":
    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(only))
sock.bind((host, int(port)))
sock.listen()
"""
WILDCARDS = [("AF_INET", "0.0.0.0", 0), ("AF_INET6", "::", 0), ("AF_INET6", "::", 1)]
ALL = [*WILDCARDS, ("AF_INET", "127.0.0.1", 0)]


def can_listen(where, port):
    """Whether another process can bind and listen, as TensorFlow's server does."""
    family, host, only = where
    command = [sys.executable, "-c", LISTEN, family, host, str(port), str(only)]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


def bound(host="127.0.0.1", reuse=1):
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
    sock.bind((host, 0))
    return sock, sock.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_reservation_does_not_keep_others_from_listening(host):
    sock, port = bound(host)
    with sock:
        assert all(can_listen(where, port) for where in ALL)


def test_a_reservation_without_reuse_does():
    sock, port = bound(reuse=0)
    with sock:
        assert not can_listen(("AF_INET", "0.0.0.0", 0), port)


def test_accepted_connections_do_not_keep_others_from_listening():
    sock, port = bound()
    sock.listen()
    dialed = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
    accepted = [sock.accept()[0] for _ in dialed]
    assert not any(can_listen(where, port) for where in WILDCARDS[:2])  # while it listens
    sock.close()
    accepted.pop().close()  # leaves TIME_WAIT on the port
    dialed.pop().close()
    assert all(can_listen(where, port) for where in ALL)
    dialed[0].sendall(b"on")
    assert accepted[0].recv(2) == b"on"
    for one in (*dialed, *accepted):
        one.close()


@pytest.mark.parametrize("reuse", [0, 1])
def test_an_outgoing_connection_from_the_port_needs_reuse(reuse):
    sock, port = bound()
    sock.listen()
    with sock, socket.socket() as dialer:
        dialer.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        dialer.connect(("127.0.0.1", port))
        ours = dialer.getsockname()[1]
        assert can_listen(("AF_INET6", "::", 0), ours) == bool(reuse)
