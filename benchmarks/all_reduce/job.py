"""The input of a backend, a `Job`, and its output, a list of `Process`."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.all_reduce.hosts import Hosts


class MissingError(Exception):
    """A backend cannot run here; the message says why and how to install it."""


@dataclass(frozen=True)
class Job:
    """The ranks that a backend must start.

    Attributes:
        ranks: the number of ranks.
        hosts: the hosts that the ranks run on.
        control: the path of the socket on which the driver waits for the ranks.
        folder: the folder for the files of this backend and number of ranks.
        builds: the folder for compiled programs, which all backends share.
        torch_python: a Python that has torch.
        impi_root: the folder of Intel MPI; "" to search for it.
        in_place: whether backends that support both reduce in place or into another buffer.
    """

    ranks: int
    hosts: Hosts
    control: Path
    folder: Path
    builds: Path
    torch_python: str
    impi_root: str = ""
    in_place: bool = True

    @property
    def host_of_rank(self) -> list[int]:
        """The number of each rank's host; the first ranks are on the first host."""
        return [rank * self.hosts.count // self.ranks for rank in range(self.ranks)]

    def addresses(self) -> list[str]:
        """Returns for each rank an address of its host with a free port."""
        ports = free_ports(self.ranks)
        return [
            f"{self.hosts.addresses[host]}:{port}"
            for host, port in zip(self.host_of_rank, ports, strict=True)
        ]

    def each_rank(self, *arguments: str, env: Mapping[str, str] | None = None) -> list[Process]:
        """Returns one process per rank, which runs on the rank's host.

        Args:
            arguments: the common arguments. The control socket, the rank, the addresses of all
                ranks and the hosts of all ranks follow; commas separate addresses and hosts.
            env: environment variables to set.
        """
        addresses = ",".join(self.addresses())
        hosts = ",".join(map(str, self.host_of_rank))
        return [
            Process([*arguments, str(self.control), str(rank), addresses, hosts], host, env or {})
            for rank, host in enumerate(self.host_of_rank)
        ]


@dataclass(frozen=True)
class Process:
    """A process to start.

    Attributes:
        command: the program and its arguments.
        host: the number of the host that it runs on.
        env: environment variables to set.
    """

    command: Sequence[str]
    host: int
    env: Mapping[str, str] = field(default_factory=dict)


def free_ports(count: int) -> list[int]:
    """Returns ports that are free on this host, and so also in new network namespaces."""
    sockets = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports
