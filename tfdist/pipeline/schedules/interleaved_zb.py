"""Interleaved 1F1B whose backward passes are in two parts."""

from __future__ import annotations

from tfdist.pipeline.plan.costs import Costs
from tfdist.pipeline.plan.schedule import Schedule
from tfdist.pipeline.schedules.interleaved import interleave
from tfdist.pipeline.schedules.pattern import BI, number
from tfdist.pipeline.schedules.zero_bubble import fill


def interleaved_zb(
    ranks: int, microbatches: int, virtual_stages: int = 2, costs: Costs | None = None
) -> Schedule:
    """Interleaved 1F1B with backward passes in two parts, the second of which fills gaps.

    Each rank runs F and I in the order of `interleaved`, and W where it would wait or has no room.

    With F, I and W seconds for a microbatch on a rank, p ranks, v stages on each and m >= p
    microbatches: each rank idles (p - 1)(F + I - W) / v seconds where F, I and W are about equal;
    peak activations are those of the first rank of `interleaved`.

    Args:
        ranks: the processes of the pipeline.
        microbatches: the parts of a batch.
        virtual_stages: the stages of a rank; rank r has r, r + ranks, r + 2 ranks, ...
        costs: what the passes take, which says where there are gaps; by default all the same.

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
