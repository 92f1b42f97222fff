"""All forward passes, then all backward passes."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist._src.pipeline.plan.schedule import Schedule
from tfdist._src.pipeline.schedules.pattern import B, F, Pass, number


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forward passes, then all backward passes.

    The simplest schedule. It keeps the activations of every microbatch.

    With F and B seconds for a microbatch on a rank, p ranks and m microbatches: each rank idles
    (p - 1)(F + B) seconds; peak activations are m on every rank.

    Args:
        ranks: the number of ranks, each with one stage.
        microbatches: the number of microbatches.

    Example:
        >>> print(*gpipe(ranks=2, microbatches=2).actions[0])
        F0.0 F0.1 B0.0 B0.1

    Source: Huang et al., "GPipe: efficient training of giant neural networks using pipeline
    parallelism", 2018, arXiv:1811.06965.
    """

    def pattern(rank: int) -> Sequence[Pass]:
        return [(F, rank)] * microbatches + [(B, rank)] * microbatches

    return number("gpipe", ranks, microbatches, pattern)
