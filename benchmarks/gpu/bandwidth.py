"""Computes bandwidths as nccl-tests defines them.

The algorithm bandwidth is the size divided by the time. The bus bandwidth is the algorithm
bandwidth multiplied by the share of the size that each GPU must send. For any number of ranks, the
bus bandwidth can be compared with the speed of a link. See
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
"""

from __future__ import annotations

# For each collective, a function that takes the number of ranks, and returns the share of the size
# that each GPU must send.
_SHARES = {
    "all-reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "reduce-scatter": lambda ranks: (ranks - 1) / ranks,
    "all-gather": lambda ranks: (ranks - 1) / ranks,
}


def algorithm_bandwidth(size: int, seconds: float) -> float:
    """Returns the algorithm bandwidth in bytes per second.

    Args:
        size: the size of the whole tensor in bytes. For an all-reduce or a reduce-scatter, this is
            the input of a rank. For an all-gather, a broadcast or a message, it is the output of a
            rank.
        seconds: the duration of the collective.
    """
    return size / seconds


def bus_bandwidth(figure: str, size: int, seconds: float, ranks: int) -> float:
    """Returns the bus bandwidth in bytes per second.

    Args:
        figure: the name of the figure. Its first word is the collective. Other collectives than
            all-reduce, reduce-scatter and all-gather send the whole size.
        size: the size of the whole tensor in bytes; see `algorithm_bandwidth`.
        seconds: the duration of the collective.
        ranks: the number of ranks.

    Example:
        >>> bus_bandwidth("all-reduce", 1000, 1.0, 8)
        1750.0
    """
    share = _SHARES.get(figure.split()[0], lambda ranks: 1)(ranks)
    return share * algorithm_bandwidth(size, seconds)
