"""1F1B with split backward passes."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist._src.pipeline.plan.costs import Costs
from tfdist._src.pipeline.plan.schedule import Schedule
from tfdist._src.pipeline.schedules.pattern import BI, F, Pass, number
from tfdist._src.pipeline.schedules.zero_bubble import fill


def zb_h1(ranks: int, microbatches: int, costs: Costs | None = None) -> Schedule:
    """1F1B with split backward passes, whose second part fills gaps.

    Each rank runs F and I in the order of 1F1B, and W when it would wait or has no room.

    With F, I and W seconds for a microbatch on a rank, p ranks and m >= p microbatches: each rank
    idles (p - 1)(F + I - W) seconds if F, I and W are about equal; peak activations are min(m,
    p), as on the first rank of 1F1B.

    Args:
        ranks: the number of ranks, each with one stage.
        microbatches: the number of microbatches.
        costs: the costs of the passes, which determine the gaps; by default, all are equal.

    Example:
        >>> print(*zb_h1(ranks=2, microbatches=2).actions[0])
        F0.0 F0.1 I0.0 W0.0 I0.1 W0.1

    Source: Qi et al., "Zero bubble pipeline parallelism", 2023, arXiv:2401.10241.
    """

    def pattern(rank: int) -> Sequence[Pass]:
        return [(F, rank)] * (ranks - 1 - rank) + [(F, rank), (BI, rank)] * microbatches

    return fill(number("zb_h1", ranks, microbatches, pattern), costs)
