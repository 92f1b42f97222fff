"""Bandwidths as nccl-tests defines them.

https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md: the algorithm bandwidth is the
size divided by the time. The bus bandwidth is the algorithm bandwidth times the share of the size
that each GPU must send. It can be compared with the speed of a link for any number of ranks.
"""

from __future__ import annotations

# The share of the size that goes through each link, by the number of ranks.
_SHARES = {
    "all-reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "reduce-scatter": lambda ranks: (ranks - 1) / ranks,
    "all-gather": lambda ranks: (ranks - 1) / ranks,
}


def algorithm_bandwidth(size: int, seconds: float) -> float:
    """Returns the algorithm bandwidth in bytes per second.

    Args:
        size: the bytes of the whole tensor: of a rank's tensor before an all-reduce or a
            reduce-scatter, or after an all-gather, a broadcast or a message.
        seconds: the duration.
    """
    return size / seconds


def bus_bandwidth(figure: str, size: int, seconds: float, ranks: int) -> float:
    """Returns the bus bandwidth in bytes per second.

    Args:
        figure: the name of the collective, which other words may follow.
        size: as for `algorithm_bandwidth`.
        seconds: the duration.
        ranks: the number of ranks.

    Example:
        >>> bus_bandwidth("all-reduce", 1000, 1.0, 8)
        1750.0
    """
    share = _SHARES.get(figure.split()[0], lambda ranks: 1)(ranks)
    return share * algorithm_bandwidth(size, seconds)
