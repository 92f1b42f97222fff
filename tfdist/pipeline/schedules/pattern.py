"""The order of each rank's passes, from which the numbers of their microbatches follow."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from tfdist.pipeline.plan.action import Action, Kind
from tfdist.pipeline.plan.schedule import Schedule

F, B = Kind.FORWARD, Kind.BACKWARD
BI, BW = Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT

# A kind and its stage. BW has no stage: it is the second part of the oldest BI that lacks it.
Pass: TypeAlias = tuple[Kind, int | None]


def number(
    name: str, ranks: int, microbatches: int, pattern: Callable[[int], Iterable[Pass]]
) -> Schedule:
    """Makes a schedule of patterns.

    The forward passes of a stage go in the order of the microbatches, and so do its backward
    passes. Passes beyond the last microbatch are left out, so that a pattern for many microbatches
    serves for fewer: nothing of one microbatch waits for another.

    Args:
        name: of the schedule.
        ranks: how many ranks there are.
        microbatches: how many microbatches there are.
        pattern: gives a rank's passes in their order.

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
    lacking: deque[Action] = deque()
    for kind, stage in pattern:
        if stage is None:
            if lacking:
                first = lacking.popleft()
                yield Action(kind, first.stage, first.microbatch)
            continue
        counts = forwards if kind is F else backwards
        action = Action(kind, stage, counts[stage])
        counts[stage] += 1
        if action.microbatch < microbatches:
            yield action
            if kind is BI:
                lacking.append(action)
