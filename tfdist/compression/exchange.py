"""The way of gradients to the other workers, and who carries which from host to host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdist.collective.native_communicator import NativeCommunicator

Split = Callable[[str, list[int]], NativeCommunicator | None]
SumOfHosts = Callable[[NativeCommunicator, list[int], list[tf.Tensor]], list[tf.Tensor]]


class Exchange:
    """The way to the other workers: exact within a host, compressed from host to host.

    Where the core does not do that by itself, the workers of a host share out the gradients: each
    carries some of them, summed over the host, to those workers of the other hosts that carry the
    same, and gives its own host what comes of it.

    Args:
        workers: the communicator of all workers.
        within_hosts: whether to compress also between the workers of a host.
        split: makes a communicator of a name with some of the workers; all call it together, with
            no members where they are in none.

    Attributes:
        workers: the communicator of all workers.
        within_hosts: as given.
        compresses: whether there is anything to compress: several hosts, or `within_hosts`.
    """

    def __init__(
        self, workers: NativeCommunicator, *, within_hosts: bool, split: Split | None = None
    ) -> None:
        self.workers = workers
        self.within_hosts = within_hosts
        hosts: dict[int, list[int]] = {}
        for rank, host in enumerate(workers.hosts):
            hosts.setdefault(host, []).append(rank)
        self.compresses = within_hosts or len(hosts) > 1
        self._host: NativeCommunicator | None = None
        self._carriers: NativeCommunicator | None = workers
        self._lanes, self._lane = 1, 0
        if within_hosts or len(hosts) in (1, workers.size):
            return
        assert split is not None
        own = hosts[workers.hosts[workers.rank]]
        self._lanes = min(map(len, hosts.values()))
        self._lane = own.index(workers.rank)
        self._host = split("host", own if len(own) > 1 else [])
        carries = self._lane < self._lanes
        carriers = [ranks[self._lane] for ranks in hosts.values()] if carries else []
        self._carriers = split("carriers", carriers)

    def carries(self, number: int) -> bool:
        """Whether this worker carries the gradient that has this number."""
        return number % self._lanes == self._lane

    def sum(
        self, gradients: Sequence[tf.Tensor], numbers: Sequence[int], sum_of_hosts: SumOfHosts
    ) -> list[tf.Tensor]:
        """Sums gradients over all workers.

        Args:
            gradients: of the same shapes on all workers.
            numbers: of each gradient, the same on all workers.
            sum_of_hosts: sums over the communicator of the workers that carry the same gradients;
                gets their places in `gradients`, and the sums of this host.

        Returns:
            The sums, bitwise equal on all workers of a host.
        """
        sums = list(gradients)
        if self._host is not None:
            sums = self._host.all_reduce(sums)
        mine = [i for i, number in enumerate(numbers) if self.carries(number)]
        if mine and self._carriers is not None:
            carried = sum_of_hosts(self._carriers, mine, [sums[i] for i in mine])
            for i, value in zip(mine, carried, strict=True):
                sums[i] = value
        if self._host is not None:
            for i, number in enumerate(numbers):
                sums[i] = self._host.broadcast(sums[i], root=number % self._lanes)
        return sums
