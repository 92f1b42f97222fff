"""Starts the workers of one backend, which then take steps on request."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from types import MappingProxyType

from benchmarks.all_reduce.hosts import HERE, Hosts
from benchmarks.step_time.backends import BACKENDS, find_python
from benchmarks.step_time.members import Members, TeamError

__all__ = ["Team", "TeamError"]


class Team(Members):
    """The workers of one backend, which sleep until the driver requests steps.

    Args:
        backend: a key of `BACKENDS`.
        model: a key of `MODELS`.
        workers: the number of workers. Each has one core and one compute thread; see `take_place`.
        optimizer: a key of `OPTIMIZERS`.
        pythons: the Python interpreters by framework; see `find_python`.
        timeout: the maximum time to wait for an answer, in seconds.
        hosts: the hosts, one for each worker. By default, all workers are on this host.

    Raises:
        MissingError: the backend cannot run here.
    """

    def __init__(
        self,
        backend: str,
        model: str,
        workers: int,
        optimizer: str = "sgd",
        pythons: Mapping[str, str] = MappingProxyType({}),
        timeout: float = 180.0,
        hosts: Hosts = HERE,
    ) -> None:
        python = find_python(backend, pythons)
        connected = BACKENDS[backend].connected and workers > 1
        addresses = free_addresses(workers) if connected else []
        if connected and hosts.namespaces:
            ports = [address.partition(":")[2] for address in addresses]
            addresses = [f"{h}:{port}" for h, port in zip(hosts.addresses, ports, strict=True)]
        order = {"backend": backend, "model": model, "optimizer": optimizer}
        super().__init__(
            [
                [*hosts.prefix(rank), python, "-m", "benchmarks.step_time.worker"]
                for rank in range(workers)
            ],
            [{**order, "rank": rank, "addresses": addresses} for rank in range(workers)],
            timeout,
        )

    def steps(self, count: int) -> float:
        """Takes steps on all workers concurrently.

        Returns:
            The total time of the steps on the slowest worker, in seconds.

        Raises:
            TeamError: a worker failed or did not answer.
        """
        return max(map(float, self.ask(count)))


def free_addresses(count: int) -> list[str]:
    """Returns loopback addresses with free ports."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    for s in sockets:
        s.close()
    return addresses
