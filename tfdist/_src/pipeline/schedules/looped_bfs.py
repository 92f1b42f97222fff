"""GPipe with several stages per rank, one stage at a time."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist._src.pipeline.plan.schedule import Schedule
from tfdist._src.pipeline.schedules.pattern import B, F, Pass, number


def looped_bfs(ranks: int, microbatches: int, virtual_stages: int = 2) -> Schedule:
    """All microbatches through a rank's first stage, then through its next; backward likewise.

    Breadth-first: the model wraps around the ranks `virtual_stages` times. The first rank begins
    its next stage once the last rank's output reaches it, so the pipeline fills in the time of one
    stage.

    With F and B seconds for a microbatch on a rank, p ranks, v stages on each and m >= p
    microbatches: each rank idles (p - 1)(F + B) / v seconds; peak activations are v m, each of one
    stage, as much as GPipe's m.

    Args:
        ranks: the number of ranks.
        microbatches: the number of microbatches.
        virtual_stages: the stages per rank; rank r holds r, r + ranks, r + 2 ranks, ...

    Example:
        >>> print(*looped_bfs(ranks=2, microbatches=2).actions[0])
        F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1

    Source: Lamy-Poirier, "Breadth-first pipeline parallelism", 2022, arXiv:2211.05953.
    """

    def pattern(rank: int) -> Sequence[Pass]:
        stages = range(rank, ranks * virtual_stages, ranks)
        forwards: list[Pass] = [(F, stage) for stage in stages for _ in range(microbatches)]
        return forwards + [(B, stage) for _, stage in reversed(forwards)]

    return number("looped_bfs", ranks, microbatches, pattern)
