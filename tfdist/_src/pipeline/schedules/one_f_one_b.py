"""GPipe, 1F1B and their interleaved variants."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from tfdist._src.pipeline.plan.schedule import Action, Kind, Schedule

F, B = Kind.FORWARD, Kind.BACKWARD
BI, BW = Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT

# A kind of pass and its stage. BW has no stage: it completes the oldest BI that has no BW yet.
Pass: TypeAlias = tuple[Kind, int | None]


def number(
    name: str, ranks: int, microbatches: int, pattern: Callable[[int], Iterable[Pass]]
) -> Schedule:
    """Makes a schedule from patterns, by numbering the microbatches.

    The forward passes of a stage follow the order of the microbatches, and so do its backward
    passes. Passes beyond the last microbatch are dropped, so a pattern for many microbatches also
    works for fewer: no pass depends on another microbatch.

    Args:
        name: the schedule's name.
        ranks: the number of ranks.
        microbatches: the number of microbatches.
        pattern: a function of a rank that returns its passes in order.

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


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Alternates forward and backward passes, after enough forwards to fill the pipeline.

    It takes as long as GPipe, but its activations do not grow with the number of microbatches.

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


def interleaved(ranks: int, microbatches: int, virtual_stages: int = 2) -> Schedule:
    """1F1B with several stages per rank, which take turns on groups of microbatches.

    The model wraps around the ranks `virtual_stages` times, so the pipeline fills in the time of
    one stage, but with `virtual_stages` times the transfers. A group has one microbatch per rank,
    or more if the microbatches do not divide evenly. Larger groups keep more activations.

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
    """Returns a rank's pattern.

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
    # The number of forward passes before forward and backward passes alternate. The last rank
    # begins to alternate once the first group reaches its last stage. Each earlier rank first runs
    # two more forward passes, or one more if ranks have a single stage.
    ahead = (virtual_stages - 1) * groups[0] + (ranks - 1 - rank) * (2 if virtual_stages > 1 else 1)
    ahead = min(ahead, len(forwards))
    turns = zip(forwards[ahead:], backwards, strict=False)
    return [
        *forwards[:ahead],
        *(each for turn in turns for each in turn),
        *backwards[len(forwards) - ahead :],
    ]


def _groups(ranks: int, microbatches: int) -> list[int]:
    """Returns the group sizes, largest first: at least `ranks` if there are enough microbatches."""
    groups = max(1, microbatches // ranks)
    return [(microbatches + groups - 1 - i) // groups for i in range(groups)]


def looped_bfs(ranks: int, microbatches: int, virtual_stages: int = 2) -> Schedule:
    """Runs all microbatches through a rank's first stage, then its next stage; likewise backward.

    Breadth-first: the model wraps around the ranks `virtual_stages` times. The first rank begins
    its next stage once the last rank's output reaches it, so the pipeline fills in the time of one
    stage.

    With F and B seconds for a microbatch on a rank, p ranks, v stages on each and m >= p
    microbatches: each rank idles (p - 1)(F + B) / v seconds; peak activations are v m, each of one
    stage, which take as much memory as the m activations of GPipe.

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
