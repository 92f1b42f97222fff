"""What a backend is told about a run, and what it answers."""

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
        ranks: how many.
        hosts: where they run.
        control: the path of the socket on which the driver waits for each rank.
        folder: for the files of this backend and these ranks.
        builds: for programs that are compiled, shared by all.
        torch_python: a Python that has torch.
        impi_root: where Intel MPI lies; empty to look for it.
        in_place: whether backends that can do both reduce in place, or into another buffer.
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
        """For each rank the number of its host: the first ranks are on the first host."""
        return [rank * self.hosts.count // self.ranks for rank in range(self.ranks)]

    def addresses(self) -> list[str]:
        """For each rank an address of its host with a port that is free."""
        ports = free_ports(self.ranks)
        return [
            f"{self.hosts.addresses[host]}:{port}"
            for host, port in zip(self.host_of_rank, ports, strict=True)
        ]

    def each_rank(self, *arguments: str, env: Mapping[str, str] | None = None) -> list[Process]:
        """One process per rank on its host.

        Args:
            arguments: of all ranks; behind them come the control socket, the rank, the addresses
                and the hosts of all ranks, the latter two with commas.
            env: variables to set.
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
        command: its arguments.
        host: the number of the host where it runs.
        env: variables to set.
    """

    command: Sequence[str]
    host: int
    env: Mapping[str, str] = field(default_factory=dict)


def free_ports(count: int) -> list[int]:
    """Ports that are free on this host; so they are on hosts that were made for the run."""
    sockets = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports
