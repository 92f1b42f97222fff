"""Binds sockets to the address of this process, and explains to the user why that fails."""

import errno
import ipaddress
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tfdist._src.cluster.cluster_spec import shown, split
from tfdist._src.cluster.net.dns import Endpoint, check_resolvable, is_numeric, resolve
from tfdist.errors import ClusterError

_LISTENING = "0A"


def local_addresses(proc: str = "/proc") -> list[str]:
    """Returns the IP addresses of this machine. Loopback addresses are at the end of the list.

    Args:
        proc: the folder at which the proc file system is mounted.

    Returns:
        The addresses; an empty list if the addresses are unknown.

    Example:
        >>> local_addresses()  # doctest: +SKIP
        ['10.0.0.7', '127.0.0.1', '::1']
    """
    found: set[ipaddress.IPv4Address | ipaddress.IPv6Address] = {*_ipv4(proc), *_ipv6(proc)}
    return [str(address) for address in sorted(found, key=lambda a: (a.is_loopback, str(a)))]


def port_holder(port: int, proc: str = "/proc") -> str | None:
    """Returns a description of the process that listens on a TCP port of this machine.

    Args:
        port: the port.
        proc: the folder at which the proc file system is mounted.

    Returns:
        The description, for example `"process 4711 (python train.py)"`. None if the process is
        unknown, for example because it belongs to another user.

    Example:
        >>> port_holder(2222)  # doctest: +SKIP
        'process 4711 (python train.py)'
    """
    links = {f"socket:[{inode}]" for inode in _listeners(port, proc)}
    if not links:
        return None
    for process in Path(proc).iterdir():
        if not process.name.isdecimal():
            continue
        try:
            if any(_target(entry) in links for entry in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                text = " ".join(command.decode(errors="replace").split())
                return f"process {process.name} ({text[:120]})"
        except OSError:  # this process has exited, or it belongs to another user
            continue
    return None


def _target(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except OSError:  # the process has closed the descriptor
        return ""


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _listeners(port: int, proc: str) -> Iterator[str]:
    """Yields the inode numbers of the sockets that listen on a port."""
    for table in ("tcp", "tcp6"):
        for line in _lines(f"{proc}/net/{table}")[1:]:
            fields = line.split()
            local, state, inode = fields[1], fields[3], fields[9]
            if state == _LISTENING and int(local.rpartition(":")[2], 16) == port:
                yield inode


def _ipv4(proc: str) -> Iterator[ipaddress.IPv4Address]:
    address = ""
    for line in _lines(f"{proc}/net/fib_trie"):
        if match := re.search(r"\|-- ([\d.]+)", line):
            address = match[1]
        elif "/32 host LOCAL" in line:
            yield ipaddress.IPv4Address(address)


def _ipv6(proc: str) -> Iterator[ipaddress.IPv6Address]:
    for line in _lines(f"{proc}/net/if_inet6"):
        yield ipaddress.IPv6Address(int(line.split()[0], 16))


_NOT_LOCAL = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def check_own(address: str, *, name: str | None = None) -> None:
    """Checks that this process can listen at its address.

    Args:
        address: the `"host:port"` of this process in the cluster.
        name: the name of this process in an error message; by default, the address.

    Raises:
        ClusterError: the host name does not resolve, the address does not belong to this machine,
            the port is in use, or the user may not use the port. If the port is in use, the message
            names the process that uses it, if that process is known.

    Example:
        >>> check_own("127.0.0.1:50123")
    """
    for claimed in claim(address, name=name):
        claimed.close()


def claim(address: str, *, name: str | None = None) -> list[socket.socket]:
    """Binds sockets to the address of this process, but does not listen.

    While the sockets are bound, the kernel does not use the port for outgoing connections. The
    option SO_REUSEADDR is set on the sockets, for two reasons. First, the launcher can reserve the
    port: it may also bind the port, as long as it does not listen. Second, another process can
    listen on the port later, while connections that this process has accepted are still open.

    Args:
        address: the `"host:port"` of this process in the cluster.
        name: the name of this process in an error message; by default, the address.

    Returns:
        One bound socket for each address family. The caller must close the sockets.

    Raises:
        ClusterError: see `check_own`.

    Example:
        >>> [s.close() for s in claim("127.0.0.1:50123")]
        [None]
    """
    endpoints = check_resolvable(address, name=name)
    try:
        return bind(address, endpoints)
    except OSError as error:
        raise explain(error, address, name or address) from None


def bind(address: str, endpoints: list[Endpoint], port: int | None = None) -> list[socket.socket]:
    """Binds sockets like `claim`, but uses the given endpoints instead of resolving the address.

    Args:
        address: the `"host:port"` of this process in the cluster.
        endpoints: the endpoints to which the address resolves.
        port: the port to bind instead of the port in the address. If this is 0, the system chooses
            a free port, which may differ between the address families.

    Returns:
        One bound socket for each address family. The caller must close the sockets.

    Raises:
        OSError: a socket cannot be bound.
    """
    bound: list[socket.socket] = []
    for family, sockaddr in _endpoints_to_bind(address, endpoints):
        try:
            target = sockaddr if port is None else (sockaddr[0], port, *sockaddr[2:])
            bound.append(_bind(family, target))
        except OSError as error:
            if error.errno in _NOT_LOCAL:
                continue
            for other in bound:
                other.close()
            raise
    if not bound:
        raise OSError(errno.EADDRNOTAVAIL, "")
    return bound


def explain(error: OSError, address: str, subject: str) -> ClusterError:
    """Converts an error of `bind` or `listen` to an error that tells the user what to do.

    Args:
        error: the error of the system call.
        address: the `"host:port"` of this process.
        subject: the name of this process, with which the message begins.

    Returns:
        The error to raise.

    Example:
        >>> type(explain(OSError(errno.EACCES, ""), "127.0.0.1:80", "worker 0")).__name__
        'ClusterError'
    """
    port = split(address)[1]
    received = f"Received: {shown(address)}."
    if error.errno == errno.EADDRINUSE:
        holder = port_holder(port) or "another process"
        return ClusterError(
            f"{subject}: port {port} is in use by {holder}. {received} Stop that process, or give "
            f"this worker another port in the cluster of all workers; if it is a worker of this "
            f"job, two processes have the same task index."
        )
    if error.errno == errno.EACCES:
        return ClusterError(
            f"{subject}: this user may not listen on port {port}. {received} "
            f"Choose a port >= 1024 in the cluster of all workers."
        )
    if error.errno in _NOT_LOCAL:
        known = ", ".join(local_addresses()) or "unknown"
        return ClusterError(
            f"{subject}: this process's address is not on this machine ({socket.gethostname()}, "
            f"with the addresses {known}). {received} Start the process on the machine with that "
            f"address, or correct the task type and index, or the cluster."
        )
    return ClusterError(
        f"{subject}: this process cannot listen at its address "
        f"({error.strerror or error}). {received} Correct the address in the cluster."
    )


def _endpoints_to_bind(address: str, endpoints: list[Endpoint]) -> list[Endpoint]:
    """Returns the endpoints to bind, so that workers on all machines can connect to this worker.

    Many machines resolve their own host name to a loopback address, but other machines resolve the
    same name to a different address. A socket accepts connections to both addresses only if it is
    bound to the wildcard address.
    """
    host, port = split(address)
    loopback = any(ipaddress.ip_address(ip.split("%")[0]).is_loopback for _, (ip, *_) in endpoints)
    if not loopback or host == "localhost" or is_numeric(host):
        return endpoints
    return [(socket.AF_INET, ("0.0.0.0", port)), (socket.AF_INET6, ("::", port))]


def _bind(family: socket.AddressFamily, sockaddr: tuple[Any, ...]) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(sockaddr)
    except OSError:
        bound.close()
        raise
    return bound


BACKLOG = 512

Ports = dict[str, int]
"""The port of each address family, by the family's name."""


def listen_near(address: str, name: str) -> list[socket.socket]:
    """Listens at the address of this process, or at another port if the port is in use.

    The port of the address is preferred, because firewalls may allow no other port. But
    TensorFlow's server may already use this port. In this case, the system chooses a free port on
    the same network interface.

    Args:
        address: the `"host:port"` of this process in the cluster.
        name: the name of this process in an error message.

    Returns:
        One non-blocking, listening socket for each address family. The caller must close the
        sockets.

    Raises:
        ClusterError: this process cannot listen at the address, not even at another port.
    """
    endpoints = check_resolvable(address, name=name)
    try:
        return _listen(address, endpoints, None)
    except OSError:  # another port may work, even if the port is not in use
        pass
    try:
        return _listen(address, endpoints, 0)
    except OSError as error:
        raise explain(error, address, name) from None


def ports(listeners: list[socket.socket], address: str) -> Ports | None:
    """Returns the ports at which the sockets listen, so that other workers can connect to them.

    Returns:
        The port of each address family. None if all of them equal the port in the address.
    """
    found = {sock.family.name: sock.getsockname()[1] for sock in listeners}
    return None if set(found.values()) == {split(address)[1]} else found


def dial_endpoints(address: str, listening: Ports | None) -> list[Endpoint]:
    """Returns the endpoints at which this process can connect to another worker.

    Args:
        address: the `"host:port"` of the other worker in the cluster.
        listening: the result of `ports` on the other worker.

    Returns:
        The endpoints to connect to, in order of preference.

    Raises:
        OSError: the host name does not resolve, or the worker does not listen with any address
            family to which the name resolves.
    """
    if listening is None:
        return resolve(address)
    found = [
        (family, (sockaddr[0], listening[family.name], *sockaddr[2:]))
        for family, sockaddr in resolve(address)
        if family.name in listening
    ]
    if not found:
        raise OSError("its name resolves to no address at which it listens")
    return found


def _listen(address: str, endpoints: list[Endpoint], port: int | None) -> list[socket.socket]:
    bound = bind(address, endpoints, port)
    try:
        for sock in bound:
            sock.listen(BACKLOG)
            sock.setblocking(False)
    except OSError:
        for sock in bound:
            sock.close()
        raise
    return bound
