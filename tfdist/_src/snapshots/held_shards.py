"""Which worker holds which shards of an optimizer's state, and whether they are all there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class HeldShards:
    """Shards of one division among ranks that a worker holds.

    Attributes:
        generation: that of the group which the division was made for.
        size: among how many ranks.
        ranks: whose shards it holds: first its own, then those that it has copies of.
        steps: after how many steps they are the state.
        redoable: whether it can also give those after one step more.
    """

    generation: int
    size: int
    ranks: tuple[int, ...]
    steps: int
    redoable: bool = False


@dataclass(frozen=True)
class ShardSource:
    """Where all shards of a division can be had.

    Attributes:
        generation: that of the division.
        senders: for each of its ranks, the worker that gives that one's shards.
    """

    generation: int
    senders: tuple[int, ...]


def find_shards(held: Sequence[Sequence[HeldShards]], steps: int) -> ShardSource | None:
    """Finds all shards of one division; of several, the latest.

    Args:
        held: what each worker holds, in rank order.
        steps: after how many steps they must be the state.

    Returns:
        None if some of each division are lost.

    Example:
        >>> first, third = HeldShards(2, 3, (0, 2), 7), HeldShards(2, 3, (2, 1), 7)
        >>> find_shards([[first], [third], []], steps=7).senders
        (0, 1, 1)
    """
    sources: dict[tuple[int, int], dict[int, int]] = {}
    for copies in (False, True):
        for worker, several in enumerate(held):
            for one in several:
                if steps not in (one.steps, one.steps + one.redoable):
                    continue
                found = sources.setdefault((one.generation, one.size), {})
                for rank in one.ranks[1:] if copies else one.ranks[:1]:
                    found.setdefault(rank, worker)
    for (generation, size), found in sorted(sources.items(), reverse=True):
        if len(found) == size:
            return ShardSource(generation, tuple(found[rank] for rank in range(size)))
    return None
