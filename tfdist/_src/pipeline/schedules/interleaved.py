"""1F1B with several stages per rank."""

from __future__ import annotations

from tfdist._src.pipeline.plan.action import Kind
from tfdist._src.pipeline.plan.schedule import Schedule
from tfdist._src.pipeline.schedules.pattern import B, F, Pass, number


def interleaved(ranks: int, microbatches: int, virtual_stages: int = 2) -> Schedule:
    """1F1B with several stages per rank, which take turns on groups of microbatches.

    The model wraps around the ranks `virtual_stages` times, so the pipeline fills in the time of
    one stage; each microbatch is sent `virtual_stages` times as often. A group has one microbatch
    per rank, or more if they do not divide evenly; then more activations are kept.

    With F and B seconds for a microbatch on a rank, p ranks, v > 1 stages on each, m >= p
    microbatches and g in the largest group: each rank idles (p - 1)(F + B) / v seconds; peak
    activations are min(v m, (v - 1) g + 2 (p - 1 - rank) + 1), each of one stage.

    Args:
        ranks: the number of ranks.
        microbatches: the number of microbatches.
        virtual_stages: the stages per rank; rank r holds r, r + ranks, r + 2 ranks, ...

    Example:
        >>> print(*interleaved(ranks=2, microbatches=2).actions[0])
        F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1

    Source: Narayanan et al., "Efficient large-scale language model training on GPU clusters using
    Megatron-LM", 2021, arXiv:2104.04473.
    """
    return number(
        "interleaved",
        ranks,
        microbatches,
        lambda rank: interleave(ranks, rank, microbatches, virtual_stages, B),
    )


def interleave(
    ranks: int, rank: int, microbatches: int, virtual_stages: int, kind: Kind
) -> list[Pass]:
    """A rank's pattern.

    Args:
        ranks: the number of ranks.
        rank: the rank.
        microbatches: the number of microbatches.
        virtual_stages: the stages per rank.
        kind: the kind of backward passes to insert: whole ones, or their first parts.
    """
    stages = range(rank, ranks * virtual_stages, ranks)
    groups = _groups(ranks, microbatches)
    forwards: list[Pass] = [(F, s) for size in groups for s in stages for _ in range(size)]
    backwards: list[Pass] = [(kind, s) for n in groups for s in reversed(stages) for _ in range(n)]
    # A rank's first backward pass follows the first group's first forward pass of its last stage,
    # and comes two passes earlier on each next rank; with one stage each, one is enough.
    ahead = (virtual_stages - 1) * groups[0] + (ranks - 1 - rank) * (2 if virtual_stages > 1 else 1)
    ahead = min(ahead, len(forwards))
    turns = zip(forwards[ahead:], backwards, strict=False)
    return [
        *forwards[:ahead],
        *(each for turn in turns for each in turn),
        *backwards[len(forwards) - ahead :],
    ]


def _groups(ranks: int, microbatches: int) -> list[int]:
    """The group sizes, largest first: at least `ranks`, unless there are fewer microbatches."""
    groups = max(1, microbatches // ranks)
    return [(microbatches + groups - 1 - i) // groups for i in range(groups)]
