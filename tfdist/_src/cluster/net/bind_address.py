"""Binds this process's address before waiting for others, and explains why that fails."""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import Any

from tfdist._src.cluster.net.dns import Endpoint, check_resolvable, is_numeric
from tfdist._src.cluster.net.local_addresses import local_addresses, port_holder
from tfdist._src.cluster.spec.host_port import shown, split
from tfdist.errors import ClusterError

_NOT_LOCAL = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def check_own(address: str, *, name: str | None = None) -> None:
    """Checks that this process can listen at its address.

    Args:
        address: `"host:port"`, this process's entry in the cluster.
        name: what to call it in an error message; the address by default.

    Raises:
        ClusterError: the name does not resolve, the address is not local, or the port is in use
            (the message names the process if it is known) or requires privileges.

    Example:
        >>> check_own("127.0.0.1:50123")
    """
    for claimed in claim(address, name=name):
        claimed.close()


def claim(address: str, *, name: str | None = None) -> list[socket.socket]:
    """Binds sockets to this process's address, without listening.

    The sockets set SO_REUSEADDR. The port may therefore be bound by another process that sets it
    and does not listen (the launcher reserves ports this way), and another listener may use it
    later while connections accepted here are still open. As long as the sockets are bound, the
    kernel does not assign the port to outgoing connections.

    Args:
        address: `"host:port"`, this process's entry in the cluster.
        name: what to call it in an error message; the address by default.

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
        endpoints: what it resolves to.
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
    """Turns a failure to bind or listen at this process's address into advice.

    Args:
        error: the system's error.
        address: the address.
        subject: what to call it in the message.

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
    """Where to listen so that the other workers can reach this one.

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
