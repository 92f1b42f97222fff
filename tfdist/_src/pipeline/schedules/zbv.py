"""Zero bubble with two stages per rank, arranged in a V."""

from __future__ import annotations

from tfdist._src.pipeline.plan.costs import Costs
from tfdist._src.pipeline.plan.schedule import Schedule
from tfdist._src.pipeline.schedules.pattern import BI, F, Pass, number
from tfdist._src.pipeline.schedules.zero_bubble import fill


def zbv(ranks: int, microbatches: int, costs: Costs | None = None) -> Schedule:
    """Two stages per rank, down the ranks and back up, with split backward passes.

    The first rank holds the first and the last stage, so a microbatch's backward pass begins where
    its forward pass began. All ranks keep the same number of activations.

    With F, I and W seconds for a microbatch on a rank, p ranks and m >= p microbatches: if F, I and
    W are equal, each rank idles (p - 1) F / 2 seconds, for m >= 2 p - 1 only before its first
    microbatch and after its last; peak activations are min(2 m, 2 p), each of one stage, as much as
    1F1B's p on its first rank.

    Args:
        ranks: the number of ranks; rank r holds stages r and 2 ranks - 1 - r.
        microbatches: the number of microbatches.
        costs: the costs of the passes, which determine the gaps; by default, all are equal.

    Example:
        >>> print(*zbv(ranks=2, microbatches=2).actions[0])
        F0.0 F0.1 F3.0 I3.0 F3.1 I3.1 I0.0 W3.0 I0.1 W3.1 W0.0 W0.1

    Source: Qi et al., "Zero bubble pipeline parallelism", 2023, arXiv:2401.10241, section 6, and
    "Pipeline parallelism with controllable memory", 2024, arXiv:2405.15362.
    """
    frame = number("zbv", ranks, microbatches, lambda rank: _pattern(ranks, rank, microbatches))
    return fill(frame, costs)


def _pattern(ranks: int, rank: int, microbatches: int) -> list[Pass]:
    down, up = rank, 2 * ranks - 1 - rank
    after = ranks - rank  # The ranks from this one to the bottom of the V.
    # Long enough for all ranks to reach the steady phase.
    steady = max(microbatches, 2 * ranks - 1) - ranks
    return [
        *[(F, down)] * (2 * after - 1),
        *[(F, up), (F, down)] * rank,
        *[(F, up), (BI, up)] * after,
        *[(F, down), (BI, down), (F, up), (BI, up)] * steady,
        *[(BI, down), (BI, up)] * rank,
        *[(BI, down)] * after,
    ]
