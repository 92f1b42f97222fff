"""Bandwidths as nccl-tests define them.

https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md: the algorithm bandwidth is the
size divided by the time; the bus bandwidth is that times what each GPU has to send of each byte,
so that it can be compared with the speed of a link, whatever the number of ranks.
"""

from __future__ import annotations

# The share of the size that goes through each link, by the number of ranks.
_SHARES = {
    "all-reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "reduce-scatter": lambda ranks: (ranks - 1) / ranks,
    "all-gather": lambda ranks: (ranks - 1) / ranks,
}


def algorithm_bandwidth(size: int, seconds: float) -> float:
    """Bytes per second.

    Args:
        size: the bytes of the whole: what a rank has before an all-reduce or a reduce-scatter, or
            after an all-gather, a broadcast or a message.
        seconds: what it has taken.
    """
    return size / seconds


def bus_bandwidth(figure: str, size: int, seconds: float, ranks: int) -> float:
    """Bytes per second.

    Args:
        figure: what was measured: a collective, perhaps with words behind its name.
        size: as for `algorithm_bandwidth`.
        seconds: what it has taken.
        ranks: how many took part.

    Example:
        >>> bus_bandwidth("all-reduce", 1000, 1.0, 8)
        1750.0
    """
    share = _SHARES.get(figure.split()[0], lambda ranks: 1)(ranks)
    return share * algorithm_bandwidth(size, seconds)
