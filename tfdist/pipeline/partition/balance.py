"""The partition of a row of calls into stages of the most even cost, exactly."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tfdist.errors import PartitionError

Costs = npt.NDArray[np.float64]


def balance(costs: Costs, stages: int) -> list[int]:
    """Divides calls into stages so that the most expensive one costs as little as can be.

    A pipeline is as fast as its slowest stage. Among the partitions that are equal in that, the
    one with the least sum of squares is chosen, which evens out the others; among those still
    equal the one whose last boundary is the earliest, and so on. The same costs give the same
    partition everywhere.

    Both steps are dynamic programs over the position of a boundary, after Bellman: the best for
    the calls before it with one stage fewer is all that the next stage needs to know.

    Args:
        costs: a matrix; `costs[i, j]` is what a stage of the calls from i to j - 1 costs, at least
            0. It is infinite where there may be no such stage, as for i >= j.
        stages: how many.

    Returns:
        The number of the call with which each stage but the first begins.

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
            f"There is no partition into {stages} stages that keeps the limits of a stage. "
            f"Received: {len(costs) - 1} calls. Ask for another number of stages, or raise the "
            "limit of memory."
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
