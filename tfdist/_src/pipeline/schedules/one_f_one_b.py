"""GPipe, 1F1B and their interleaved variants."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from tfdist._src.pipeline.plan.schedule import Action, Kind, Schedule

F, B = Kind.FORWARD, Kind.BACKWARD
BI, BW = Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT

# A kind of pass and its stage. BW has no stage, since it always belongs to the same stage and
# microbatch as the oldest BI for which no BW has run yet.
Pass: TypeAlias = tuple[Kind, int | None]


def number(
    name: str, ranks: int, microbatches: int, pattern: Callable[[int], Iterable[Pass]]
) -> Schedule:
    """Makes a schedule from patterns, which do not contain the indices of microbatches.

    The n-th forward pass of a stage belongs to the n-th microbatch, and so does the n-th backward
    pass of the stage. Passes beyond the last microbatch are dropped. So a pattern for many
    microbatches can also be used for fewer microbatches. The shorter schedule is valid as well,
    since no pass depends on a pass of a later microbatch.

    Args:
        name: the schedule's name.
        ranks: the number of ranks.
        microbatches: the number of microbatches.
        pattern: a function that takes a rank and returns the rank's passes in order.

    Example:
        >>> print(*number("mine", 1, 2, lambda rank: [(F, 0), (B, 0)] * 3).actions[0])
        F0.0 B0.0 F0.1 B0.1
    """
    return Schedule(
        name, tuple(tuple(_number(pattern(rank), microbatches)) for rank in range(ranks))
    )


def _number(pattern: Iterable[Pass], microbatches: int) -> Iterator[Action]:
    forwards: Counter[int] = Counter()
    backwards: Counter[int] = Counter()
    pending: deque[Action] = deque()
    for kind, stage in pattern:
        if stage is None:
            if pending:
                first = pending.popleft()
                yield Action(kind, first.stage, first.microbatch)
            continue
        counts = forwards if kind is F else backwards
        action = Action(kind, stage, counts[stage])
        counts[stage] += 1
        if action.microbatch < microbatches:
            yield action
            if kind is BI:
                pending.append(action)


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """Runs all forward passes, then all backward passes.

    This is the simplest schedule. It keeps the activations of every microbatch.

    Suppose that on each of p ranks, the forward pass of a microbatch takes F seconds and the
    backward pass takes B seconds. With m microbatches, each rank idles for (p - 1)(F + B) seconds
    and keeps at most m activations (its peak activations).

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


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Alternates forward and backward passes after an initial phase of forward passes.

    In the initial phase, the ranks run enough forward passes to fill the pipeline. The schedule
    takes as long as GPipe, but the number of activations does not grow with the number of
    microbatches.

    Suppose that on each of p ranks, the forward pass of a microbatch takes F seconds and the
    backward pass takes B seconds. With m microbatches, each rank idles for (p - 1)(F + B) seconds,
    and rank r keeps at most min(m, p - r) activations (its peak activations).

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


def interleaved(ranks: int, microbatches: int, virtual_stages: int = 2) -> Schedule:
    """Runs 1F1B with several stages per rank.

    The microbatches are divided into groups. A rank runs one of its stages for all microbatches of
    a group, then its next stage for the same group, and so on. A microbatch passes through all
    ranks `virtual_stages` times. So each stage is shorter than in 1F1B and the pipeline fills
    faster, but the ranks transfer `virtual_stages` times as many values. A group has as many
    microbatches as there are ranks, or more if the microbatches cannot be divided evenly. With
    larger groups, the ranks keep more activations.

    Suppose that on each of p ranks, a microbatch takes F seconds forward and B seconds backward in
    all v > 1 stages of the rank together. With m >= p microbatches, each rank idles for
    (p - 1)(F + B) / v seconds. If the largest group has g microbatches, rank r keeps at most
    min(v m, (v - 1) g + 2 (p - 1 - r) + 1) activations (its peak activations), each of a single
    stage.

    Args:
        ranks: the number of ranks.
        microbatches: the number of microbatches.
        virtual_stages: the number of stages per rank. Rank r holds the stages r, r + ranks,
            r + 2 ranks, and so on.

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
    """Returns the passes of a rank in an interleaved schedule, as a pattern for `number`.

    Args:
        ranks: the number of ranks.
        rank: the rank.
        microbatches: the number of microbatches.
        virtual_stages: the number of stages per rank.
        kind: the kind of the backward passes: B for whole backward passes, or I for only the first
            part of split backward passes.
    """
    stages = range(rank, ranks * virtual_stages, ranks)
    groups = _groups(ranks, microbatches)
    forwards: list[Pass] = [(F, s) for size in groups for s in stages for _ in range(size)]
    backwards: list[Pass] = [(kind, s) for n in groups for s in reversed(stages) for _ in range(n)]
    # The number of forward passes that the rank runs before forward and backward passes alternate.
    # The last rank begins to alternate when the first group reaches the rank's last stage. Every
    # earlier rank runs two more of these forward passes than the rank after it, or one more if each
    # rank has a single stage.
    ahead = (virtual_stages - 1) * groups[0] + (ranks - 1 - rank) * (2 if virtual_stages > 1 else 1)
    ahead = min(ahead, len(forwards))
    turns = zip(forwards[ahead:], backwards, strict=False)
    return [
        *forwards[:ahead],
        *(each for turn in turns for each in turn),
        *backwards[len(forwards) - ahead :],
    ]


def _groups(ranks: int, microbatches: int) -> list[int]:
    """Returns the number of microbatches in each group, in descending order.

    Each group has at least `ranks` microbatches, unless there are fewer microbatches than ranks.
    """
    groups = max(1, microbatches // ranks)
    return [(microbatches + groups - 1 - i) // groups for i in range(groups)]


def looped_bfs(ranks: int, microbatches: int, virtual_stages: int = 2) -> Schedule:
    """Runs all microbatches through one stage of a rank before the rank's next stage.

    This is GPipe with several stages per rank, in breadth-first order. The backward passes run in
    the opposite order, after all forward passes. A microbatch passes through all ranks
    `virtual_stages` times. So each stage is shorter than in GPipe, and the pipeline fills faster.

    Suppose that on each of p ranks, a microbatch takes F seconds forward and B seconds backward in
    all v stages of the rank together. With m >= p microbatches, each rank idles for
    (p - 1)(F + B) / v seconds and keeps at most v m activations (its peak activations), each of a
    single stage. They take as much memory as the m activations of GPipe.

    Args:
        ranks: the number of ranks.
        microbatches: the number of microbatches.
        virtual_stages: the number of stages per rank. Rank r holds the stages r, r + ranks,
            r + 2 ranks, and so on.

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
