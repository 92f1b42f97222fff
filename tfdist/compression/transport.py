"""The way of gradients to the other workers, and what of it is compressed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tfdist.collective.native_communicator import NativeCommunicator
from tfdist.compression.host_leaders import HostLeaders

Split = Callable[[str, list[int]], NativeCommunicator | None]


def is_shared_out(hosts: Sequence[int]) -> bool:
    """Whether workers on these hosts share out gradients: several hosts, some with several.

    Args:
        hosts: for each worker the number of its host.
    """
    return 1 < len(set(hosts)) < len(hosts)


class Exchange:
    """One replica's way: exact within a worker and a host, compressed from host to host.

    Args:
        workers: the communicator of this replica with the like one of each worker.
        within_hosts: whether to compress also between the workers of a host.
        devices: how the devices of this worker share out gradients.
        split: makes a communicator of a name with some of the workers; all call it together, with
            no members where they are in none. Needed, and called for "host" and "carriers", where
            they do not compress within hosts and `is_shared_out`.

    Attributes:
        workers: as given.
        within_hosts: as given.
        devices: as given.
        host: how the workers of this host share out gradients, where the core does not.
        carriers: the communicator of those workers, one of each host, that carry the same gradients
            as this one; None for one that carries none.
        compresses: whether there is anything to compress: several hosts, or `within_hosts`.
    """

    def __init__(
        self,
        workers: NativeCommunicator,
        *,
        within_hosts: bool,
        devices: HostLeaders = HostLeaders(),  # noqa: B008 (it is frozen)
        split: Split | None = None,
    ) -> None:
        self.workers = workers
        self.within_hosts = within_hosts
        self.devices = devices
        self.host = HostLeaders()
        self.carriers: NativeCommunicator | None = workers
        hosts: dict[int, list[int]] = {}
        for rank, host in enumerate(workers.hosts):
            hosts.setdefault(host, []).append(rank)
        self.compresses = within_hosts or len(hosts) > 1
        if within_hosts or not is_shared_out(workers.hosts):
            return
        assert split is not None
        own = hosts[workers.hosts[workers.rank]]
        lanes, lane = min(map(len, hosts.values())), own.index(workers.rank)
        group = split("host", own if len(own) > 1 else [])
        self.host = HostLeaders(group, lanes, lane, stride=devices.lanes)
        carriers = [ranks[lane] for ranks in hosts.values()] if lane < lanes else []
        self.carriers = split("carriers", carriers)

    def carries(self, number: int) -> bool:
        """Whether this replica carries the gradient of a number from host to host."""
        return self.devices.carries(number) and self.host.carries(number)
