"""Binds this process's address, and explains failures to do so."""

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
    """Returns the IP addresses of this machine's interfaces, loopback last.

    Args:
        proc: where the proc file system is mounted.

    Returns:
        The addresses; empty if they are unknown.

    Example:
        >>> local_addresses()  # doctest: +SKIP
        ['10.0.0.7', '127.0.0.1', '::1']
    """
    found: set[ipaddress.IPv4Address | ipaddress.IPv6Address] = {*_ipv4(proc), *_ipv6(proc)}
    return [str(address) for address in sorted(found, key=lambda a: (a.is_loopback, str(a)))]


def port_holder(port: int, proc: str = "/proc") -> str | None:
    """Returns the process that listens on a TCP port of this machine.

    Args:
        port: the port.
        proc: where the proc file system is mounted.

    Returns:
        For example `"process 4711 (python train.py)"`; None if it is unknown, as on other operating
        systems and for another user's process.

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
        except OSError:  # the process has exited, or belongs to another user
            continue
    return None


def _target(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except OSError:  # closed in the meantime
        return ""


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _listeners(port: int, proc: str) -> Iterator[str]:
    """Yields the inodes of the sockets listening on a port."""
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
        address: `"host:port"`, this process's entry in the cluster.
        name: its name in an error message; the address by default.

    Raises:
        ClusterError: the name does not resolve, the address is not local, the port is in use (the
            message names the process that uses it, if known), or the port requires privileges.

    Example:
        >>> check_own("127.0.0.1:50123")
    """
    for claimed in claim(address, name=name):
        claimed.close()


def claim(address: str, *, name: str | None = None) -> list[socket.socket]:
    """Binds sockets to this process's address, without listening.

    The sockets set SO_REUSEADDR. Another process that also sets it and does not listen may
    therefore bind the port (the launcher reserves ports this way). Another listener may use the
    port later, while connections accepted here are still open. While the sockets are bound, the
    kernel does not assign the port to outgoing connections.

    Args:
        address: `"host:port"`, this process's entry in the cluster.
        name: its name in an error message; the address by default.

    Returns:
        One bound socket for each family of the address; the caller closes them.

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
    """Binds sockets as `claim` does, to endpoints that are already resolved.

    Args:
        address: `"host:port"`, this process's entry in the cluster.
        endpoints: the endpoints that the address resolves to.
        port: a different port to bind; 0 lets the system choose one, possibly a different one for
            each family.

    Returns:
        One bound socket for each family of the address; the caller closes them.

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
    """Converts a failure to bind or listen at this process's address into advice.

    Args:
        error: the system's error.
        address: the address.
        subject: the subject of the message.

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
    """Returns endpoints at which the other workers can reach this one.

    Many systems resolve their own name to loopback, while other machines resolve it to an
    interface. Only the wildcard address serves both.
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
    """Listens at this process's address, or at another port if the port is taken.

    Firewalls allow the port of the address, but TensorFlow's server may already use it. The system
    then chooses another port on the same interface.

    Args:
        address: `"host:port"`, this process's entry in the cluster.
        name: its name in an error message.

    Returns:
        A listening socket for each family of the address; the caller closes them.

    Raises:
        ClusterError: this process cannot listen at the address at any port.
    """
    endpoints = check_resolvable(address, name=name)
    try:
        return _listen(address, endpoints, None)
    except OSError:  # another port may work, regardless of the cause
        pass
    try:
        return _listen(address, endpoints, 0)
    except OSError as error:
        raise explain(error, address, name) from None


def ports(listeners: list[socket.socket], address: str) -> Ports | None:
    """Returns the ports at which the sockets listen, to send to the workers that dial.

    Returns:
        The ports; None if they equal the port in the address.
    """
    found = {sock.family.name: sock.getsockname()[1] for sock in listeners}
    return None if set(found.values()) == {split(address)[1]} else found


def dial_endpoints(address: str, listening: Ports | None) -> list[Endpoint]:
    """Returns the endpoints at which to dial a worker.

    Args:
        address: its entry in the cluster.
        listening: its `ports`; None for the port in the address.

    Returns:
        The endpoints to connect to, in order of preference.

    Raises:
        OSError: the name does not resolve, or resolves to no address at which the worker listens.
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
