"""The types by which the benchmark and its backends communicate.

A backend is a function that takes a `Job` and returns a list of `Process` objects.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.all_reduce.hosts import Hosts


class MissingError(Exception):
    """Raised if a backend cannot run here.

    The message contains the reason, and explains how to install the backend.
    """


@dataclass(frozen=True)
class Job:
    """Describes the ranks that a backend must start.

    Attributes:
        ranks: the number of ranks.
        hosts: the hosts that the ranks run on.
        control: the path of the Unix socket at which the ranks connect to the driver, the process
            that runs the benchmark.
        folder: the folder for the files of this job. Each backend and each number of ranks has a
            separate folder.
        builds: the folder for compiled programs. All jobs share this folder.
        torch_python: the path of a Python interpreter that can import torch.
        impi_root: the folder of Intel MPI; if it is "", the backend searches for the folder.
        in_place: whether the result of a reduction overwrites its input. Some backends ignore this.
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
        """For each rank, the number of its host; the first ranks are on the first host."""
        return [rank * self.hosts.count // self.ranks for rank in range(self.ranks)]

    def addresses(self) -> list[str]:
        """Returns an address for each rank: the address of its host, and a free port."""
        ports = free_ports(self.ranks)
        return [
            f"{self.hosts.addresses[host]}:{port}"
            for host, port in zip(self.host_of_rank, ports, strict=True)
        ]

    def each_rank(self, *arguments: str, env: Mapping[str, str] | None = None) -> list[Process]:
        """Returns one process for each rank, to be started on the host of the rank.

        Args:
            arguments: the program, and the arguments that are the same for all ranks. This method
                adds four arguments: the path of the control socket, the rank, the addresses of all
                ranks, and the host numbers of all ranks. Commas separate addresses and numbers.
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
        host: the number of the host on which the process runs.
        env: environment variables to set.
    """

    command: Sequence[str]
    host: int
    env: Mapping[str, str] = field(default_factory=dict)


def free_ports(count: int) -> list[int]:
    """Returns ports that are free on this host, and in new network namespaces."""
    sockets = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports
