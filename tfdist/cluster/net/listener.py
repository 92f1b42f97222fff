"""Listens where the other workers can reach this one, though its own port may be taken."""

from __future__ import annotations

import socket

from tfdist.cluster.net.bind_address import bind, explain
from tfdist.cluster.net.dns import Endpoint, check_resolvable, resolve

BACKLOG = 512

Ports = dict[str, int]
"""The port for each family, by the family's name."""


def listen_near(address: str, name: str) -> list[socket.socket]:
    """Listens at this process's own address, or beside it where something else listens there.

    Firewalls let the port of the address through; but by the time that connections are made,
    TensorFlow's server may have it. Then the system chooses another port of the same interface.

    Args:
        address: `"host:port"`, this process's entry in the cluster.
        name: what to call it in an error message.

    Returns:
        A listening socket for each family of the address; the caller closes them.

    Raises:
        ClusterError: this process can listen neither at the address nor beside it.
    """
    endpoints = check_resolvable(address, name=name)
    try:
        return _listen(address, endpoints, None)
    except OSError:  # whatever is the matter with the port, the interface is what counts
        pass
    try:
        return _listen(address, endpoints, 0)
    except OSError as error:
        raise explain(error, address, name) from None


def ports(listeners: list[socket.socket]) -> Ports:
    """Where the sockets listen, to be told to those who are to dial."""
    return {sock.family.name: sock.getsockname()[1] for sock in listeners}


def places(address: str, listening: Ports) -> list[Endpoint]:
    """Where to dial a worker.

    Args:
        address: its entry in the cluster.
        listening: what it said of its `ports`.

    Returns:
        What to connect to, the preferred first.

    Raises:
        OSError: its name does not resolve, or to nothing where it listens.
    """
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
