"""Interleaved 1F1B with split backward passes."""

from __future__ import annotations

from tfdist._src.pipeline.plan.costs import Costs
from tfdist._src.pipeline.plan.schedule import Schedule
from tfdist._src.pipeline.schedules.interleaved import interleave
from tfdist._src.pipeline.schedules.pattern import BI, number
from tfdist._src.pipeline.schedules.zero_bubble import fill


def interleaved_zb(
    ranks: int, microbatches: int, virtual_stages: int = 2, costs: Costs | None = None
) -> Schedule:
    """Interleaved 1F1B with split backward passes, whose second part fills gaps.

    Each rank runs F and I in the order of `interleaved`, and W when it would wait or has no room.

    With F, I and W seconds for a microbatch on a rank, p ranks, v stages on each and m >= p
    microbatches: each rank idles (p - 1)(F + I - W) / v seconds if F, I and W are about equal;
    peak activations are those of the first rank of `interleaved`.

    Args:
        ranks: the number of ranks.
        microbatches: the number of microbatches.
        virtual_stages: the stages per rank; rank r holds r, r + ranks, r + 2 ranks, ...
        costs: the costs of the passes, which determine the gaps; by default, all are equal.

    Example:
        >>> print(*interleaved_zb(ranks=2, microbatches=2).actions[0])
        F0.0 F0.1 F2.0 F2.1 I2.0 W2.0 I2.1 I0.0 I0.1 W2.1 W0.0 W0.1

    Source: Narayanan et al., 2021, arXiv:2104.04473, for the order; Qi et al., "Zero bubble
    pipeline parallelism", 2023, arXiv:2401.10241, for the two parts.
    """
    frame = number(
        "interleaved_zb",
        ranks,
        microbatches,
        lambda rank: interleave(ranks, rank, microbatches, virtual_stages, BI),
    )
    return fill(frame, costs)
