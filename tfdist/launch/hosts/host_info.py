"""What a node says of itself when it arrives, and whether the nodes fit together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from typing import Any

from tfdist._version import __version__
from tfdist.cluster.net.dns import is_numeric

_MOST_PORTS = 4096
_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,253}")


@dataclass(frozen=True)
class HostInfo:
    """One node of a job.

    Attributes:
        rank: its number.
        nnodes: how many nodes it was told there are.
        host: its address for the other workers; "" to take that of its connection.
        ports: the ports of its workers.
        version: its version of tfdist.
    """

    rank: int
    nnodes: int
    host: str
    ports: tuple[int, ...]
    version: str = __version__

    def to_message(self) -> dict[str, Any]:
        """The hello as JSON can hold it."""
        return {"hello": asdict(self)}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> HostInfo:
        """The inverse of `to_message`.

        Raises:
            ValueError: the message is not one of `to_message`.
        """
        try:
            fields = message["hello"]
            hello = cls(
                rank=int(fields["rank"]),
                nnodes=int(fields["nnodes"]),
                host=str(fields["host"]),
                ports=tuple(int(port) for port in fields["ports"]),
                version=str(fields["version"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a hello: {error!r}") from error
        fits = 0 < len(hello.ports) <= _MOST_PORTS and all(0 < p < 65536 for p in hello.ports)
        if not fits or (hello.host and not _HOST.fullmatch(hello.host)):
            raise ValueError("not a hello: its host or ports cannot be right")
        return hello


def objection(newcomer: HostInfo, source: str, mine: HostInfo, arrived: Mapping[int, str]) -> str:
    """Why a node cannot be part of the job.

    Args:
        newcomer: the node.
        source: the address that it came from.
        mine: node 0.
        arrived: rank -> address of the nodes that are there, node 0 included.

    Returns:
        One line for all nodes to show; "" if it can.

    Example:
        >>> a, b = HostInfo(0, 2, "", (4000,)), HostInfo(1, 3, "", (4000,))
        >>> objection(b, "10.0.0.2", a, {0: "10.0.0.1"})
        'node 1 (10.0.0.2) was started with --nnodes 3, node 0 with --nnodes 2: ...'
    """
    name = f"node {newcomer.rank} ({source})"
    if newcomer.version != mine.version:
        return (
            f"{name} has tfdist {newcomer.version}, node 0 has {mine.version}: "
            f"install the same version on all nodes"
        )
    if newcomer.nnodes != mine.nnodes:
        return (
            f"{name} was started with --nnodes {newcomer.nnodes}, node 0 with "
            f"--nnodes {mine.nnodes}: give all nodes the same number"
        )
    if newcomer.rank in arrived:
        return (
            f"two nodes were started with --node-rank {newcomer.rank}: "
            f"{arrived[newcomer.rank]} and {source}; give each node its own number"
        )
    if not 0 < newcomer.rank < mine.nnodes:
        return f"{name} must have a --node-rank from 1 to {mine.nnodes - 1}"
    return ""


def unreachable(hosts: Mapping[int, str]) -> str:
    """Why some nodes could not reach others at these addresses.

    Args:
        hosts: node rank -> its address for the other workers.

    Returns:
        One line for all nodes to show; "" if nothing speaks against them.
    """
    local = [rank for rank, host in hosts.items() if _is_loopback(host)]
    if len(local) in (0, len(hosts)):
        return ""
    return (
        f"node {local[0]} would be reached at {hosts[local[0]]}, which works on its own machine "
        f"only: give it --host with an address that the other nodes reach"
    )


def worker_addresses(nodes: Mapping[int, tuple[str, tuple[int, ...]]]) -> list[str]:
    """The address of every worker, in rank order.

    Args:
        nodes: node rank -> its host and its workers' ports.

    Example:
        >>> worker_addresses({1: ("fd00::2", (4000,)), 0: ("10.0.0.1", (4001, 4002))})
        ['10.0.0.1:4001', '10.0.0.1:4002', '[fd00::2]:4000']
    """
    return [
        f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        for _, (host, ports) in sorted(nodes.items())
        for port in ports
    ]


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (is_numeric(host) and ip_address(host).is_loopback)
