"""A mistake in this process's address is found before waiting for others."""

import errno
import os
import socket
import subprocess
import sys
import threading

import pytest

from tfdist._src.cluster import check_own, check_resolvable
from tfdist._src.cluster.net.listener import claim, local_addresses, port_holder
from tfdist.errors import ClusterError

RESERVE = """
import socket, sys
sock = socket.socket()
sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
sock.bind(("127.0.0.1", int(sys.argv[1])))
print("bound", flush=True)
sys.stdin.read()
"""


def listener():
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    return sock, sock.getsockname()[1]


def refusal(address, name=None):
    with pytest.raises(ClusterError) as caught:
        check_own(address, name=name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_free_address_passes_and_is_released(addresses):
    (address,) = addresses(1)
    check_own(address)
    check_own(address)  # the first call has released it


def test_reserved_by_another_process(addresses):
    (address,) = addresses(1)
    port = address.rpartition(":")[2]
    with subprocess.Popen(
        [sys.executable, "-c", RESERVE, port], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout.readline()
        check_own(address)


def test_port_in_use_names_the_holder():
    sock, port = listener()
    with sock:
        message = refusal(f"127.0.0.1:{port}", name=f"worker 3 (127.0.0.1:{port})")
    for part in (f"worker 3 (127.0.0.1:{port}): port {port} is in use", f"process {os.getpid()} ("):
        assert part in message
    assert "another port" in message


def test_port_in_use_by_an_unknown_process(monkeypatch):
    monkeypatch.setattr("tfdist._src.cluster.net.listener.port_holder", lambda port: None)
    sock, port = listener()
    with sock:
        assert "in use by another process" in refusal(f"127.0.0.1:{port}")


def test_address_of_another_machine():
    message = refusal("198.51.100.7:2222")
    for part in ("not on this machine", socket.gethostname(), "127.0.0.1", "'198.51.100.7:2222'"):
        assert part in message


def test_port_needs_privileges(monkeypatch):
    def bind(family, sockaddr):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("tfdist._src.cluster.net.listener._bind", bind)
    message = refusal("127.0.0.1:80")
    assert "may not listen on port 80" in message
    assert ">= 1024" in message


def test_other_failures_to_bind_are_named(monkeypatch):
    def bind(family, sockaddr):
        raise OSError(errno.ENOBUFS, "No buffer space")

    monkeypatch.setattr("tfdist._src.cluster.net.listener._bind", bind)
    assert "No buffer space" in refusal("127.0.0.1:2222")


def test_name_does_not_resolve(monkeypatch):
    def getaddrinfo(*args, **kwargs):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with pytest.raises(ClusterError) as caught:
        check_resolvable("h0x:2222", name="worker 0 (h0x:2222)", timeout=0.1)
    for part in ("worker 0 (h0x:2222): the host name", "Name or service not known", "Correct it"):
        assert part in str(caught.value)


def test_name_that_resolves_later(monkeypatch):
    answers = [socket.gaierror(socket.EAI_AGAIN, "Try again")]
    real = socket.getaddrinfo

    def getaddrinfo(host, *args, **kwargs):
        if answers:
            raise answers.pop()
        return real("127.0.0.1", *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert check_resolvable("h0:2222")[0][1] == ("127.0.0.1", 2222)


def test_silent_name_service_times_out(monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: release.wait() and [])
    try:
        with pytest.raises(ClusterError, match="no answer from the name service"):
            check_resolvable("h0:2222", timeout=0.2)
    finally:
        release.set()


@pytest.mark.parametrize("host", ["x" * 64, "a..b"])
def test_a_name_that_does_not_resolve_is_refused(host):
    with pytest.raises(ClusterError, match="does not resolve"):
        check_resolvable(f"{host}:2222", timeout=0.1)


def test_name_resolving_to_loopback_binds_the_wildcard_address(monkeypatch, addresses):
    port = int(addresses(1)[0].rpartition(":")[2])
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
    claimed = claim(f"h0:{port}")
    assert claimed[0].getsockname()[0] == "0.0.0.0"
    for sock in claimed:
        sock.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_loopback_stays_loopback(addresses, host):
    port = addresses(1)[0].rpartition(":")[2]
    claimed = claim(f"{host}:{port}")
    assert {sock.getsockname()[0] for sock in claimed} <= {"127.0.0.1", "::1"}
    assert not any(os.get_inheritable(sock.fileno()) for sock in claimed)
    for sock in claimed:
        sock.close()


def test_local_addresses_include_loopback_and_no_strangers():
    found = local_addresses()
    assert "127.0.0.1" in found
    assert not any("198.51.100.7" in address for address in found)


def test_the_process_that_listens_on_a_port_is_named(addresses):
    sock, port = listener()
    with sock:
        assert f"process {os.getpid()} (" in port_holder(port)
    assert port_holder(port) is None
    assert port_holder(int(addresses(1)[0].rpartition(":")[2])) is None  # bound, not listening


def test_without_a_proc_file_system(tmp_path):
    assert local_addresses(str(tmp_path)) == []
    assert port_holder(2222, str(tmp_path)) is None
