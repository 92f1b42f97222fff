"""Patterns: the order of each rank's passes, which determines their microbatches."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from tfdist._src.pipeline.plan.action import Action, Kind
from tfdist._src.pipeline.plan.schedule import Schedule

F, B = Kind.FORWARD, Kind.BACKWARD
BI, BW = Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT

# A kind and its stage. BW has no stage: it is the second part of the oldest BI still without one.
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
