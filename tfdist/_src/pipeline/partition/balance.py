"""Exact partition of a sequence of calls into stages of the most even cost."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tfdist.errors import PartitionError

Costs = npt.NDArray[np.float64]


def balance(costs: Costs, stages: int) -> list[int]:
    """Divides calls into stages such that the most expensive one costs as little as possible.

    A pipeline is only as fast as its slowest stage. Ties are broken by the smallest sum of squares,
    which evens out the other stages, then by the earliest last boundary, and so on. The same costs
    yield the same partition everywhere.

    Both steps are dynamic programs (Bellman) over the position of a boundary: all that the next
    stage needs is the optimum for the calls before it with one stage fewer.

    Args:
        costs: a matrix; `costs[i, j]` is the cost, at least 0, of a stage of calls i to j - 1. It
            is infinite if that stage is not allowed, as for i >= j.
        stages: the number of stages.

    Returns:
        The index of the first call of each stage but the first.

    Raises:
        PartitionError: there is no such partition.

    Example:

        >>> prefix = np.array([0, 4, 5, 6, 10])  # Calls that cost 4, 1, 1 and 4.
        >>> costs = prefix[None] - prefix[:, None]
        >>> balance(np.where(np.triu(costs, 1), costs, np.inf), stages=2)
        [2]
    """
    least = costs[0]
    for _ in range(stages - 1):
        least = np.maximum(least[:, None], costs).min(axis=0)
    worst = least[-1]
    if not np.isfinite(worst):
        raise PartitionError(
            f"There is no partition into {stages} stages within the limits of a stage. "
            f"Received: {len(costs) - 1} calls. Choose another number of stages, or raise the "
            "memory limit."
        )
    squares = np.where(costs <= worst, costs, np.inf) ** 2
    sums, begins = squares[0], []
    for _ in range(stages - 1):
        candidates = sums[:, None] + squares
        begins.append(candidates.argmin(axis=0))
        sums = candidates.min(axis=0)
    boundaries = [len(costs) - 1]
    for begin in reversed(begins):
        boundaries.append(int(begin[boundaries[-1]]))
    return boundaries[:0:-1]
