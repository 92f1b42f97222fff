"""Listens where the other workers can reach this one, even if its port is taken."""

from __future__ import annotations

import socket

from tfdist._src.cluster.net.bind_address import bind, explain
from tfdist._src.cluster.net.dns import Endpoint, check_resolvable, resolve
from tfdist._src.cluster.spec.host_port import split

BACKLOG = 512

Ports = dict[str, int]
"""The port of each address family, by the family's name."""


def listen_near(address: str, name: str) -> list[socket.socket]:
    """Listens at this process's address, or at another port of it if that one is taken.

    Firewalls allow the port of the address, but TensorFlow's server may already use it. The system
    then chooses another port on the same interface.

    Args:
        address: `"host:port"`, this process's entry in the cluster.
        name: what to call it in an error message.

    Returns:
        A listening socket for each family of the address; the caller closes them.

    Raises:
        ClusterError: this process cannot listen at the address, at any port.
    """
    endpoints = check_resolvable(address, name=name)
    try:
        return _listen(address, endpoints, None)
    except OSError:  # whatever the cause, another port may work
        pass
    try:
        return _listen(address, endpoints, 0)
    except OSError as error:
        raise explain(error, address, name) from None


def ports(listeners: list[socket.socket], address: str) -> Ports | None:
    """The ports at which the sockets listen, to send to the workers that dial.

    Returns:
        The ports; None if they are that of the address.
    """
    found = {sock.family.name: sock.getsockname()[1] for sock in listeners}
    return None if set(found.values()) == {split(address)[1]} else found


def dial_endpoints(address: str, listening: Ports | None) -> list[Endpoint]:
    """The endpoints at which to dial a worker.

    Args:
        address: its entry in the cluster.
        listening: its `ports`; None for that of the address.

    Returns:
        The endpoints to connect to, in order of preference.

    Raises:
        OSError: its name does not resolve, or not to an address at which it listens.
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
