"""The port on which a worker serves its metrics."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist._src.cluster.cluster_spec import split


def port_of(first: int, addresses: Sequence[str], rank: int) -> int:
    """The first port, plus the number of workers before this one on its host.

    Args:
        first: the setting, the same on all workers.
        addresses: `"host:port"` of every worker in rank order; empty for a single process.
        rank: the worker's.

    Example:
        >>> addresses = ["a:4000", "a:4001", "b:4000", "b:4001"]
        >>> [port_of(9400, addresses, rank) for rank in range(4)]
        [9400, 9401, 9400, 9401]
    """
    hosts = [split(address)[0] for address in addresses]
    return first + hosts[:rank].count(hosts[rank]) if hosts else first
