"""Alternating forward and backward passes."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist._src.pipeline.plan.schedule import Schedule
from tfdist._src.pipeline.schedules.pattern import B, F, Pass, number


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Alternates forward and backward passes, after enough forwards to fill the pipeline.

    It takes as long as GPipe, but the activations it keeps do not grow with the microbatches.

    With F and B seconds for a microbatch on a rank, p ranks and m microbatches: each rank idles
    (p - 1)(F + B) seconds; peak activations are min(m, p - rank).

    Args:
        ranks: the number of ranks, each with one stage.
        microbatches: the number of microbatches.

    Example:
        >>> print(*one_f_one_b(ranks=2, microbatches=2).actions[0])
        F0.0 F0.1 B0.0 B0.1

    Source: Narayanan et al., "PipeDream", SOSP 2019; without its stale weights, PipeDream-Flush in
    "Memory-efficient pipeline-parallel DNN training", 2020, arXiv:2006.09503.
    """

    def pattern(rank: int) -> Sequence[Pass]:
        return [(F, rank)] * (ranks - 1 - rank) + [(F, rank), (B, rank)] * microbatches

    return number("1f1b", ranks, microbatches, pattern)
