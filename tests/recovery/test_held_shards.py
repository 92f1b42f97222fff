"""Whether all shards of an optimizer's state are there, and who has them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.harness.tiers import exhaustive
from tfdist._src.recovery.agreement import FitProgress, agree
from tfdist._src.snapshots.shard_state import HeldShards, ShardSource, find_shards
from tfdist.errors import GroupLostError, ProgramMismatchError

pytestmark = exhaustive


def held(generation: int, size: int, rank: int, copies: int, **when: Any) -> HeldShards:
    """What a rank holds of a division: its own shards, and perhaps a copy of those before."""
    ranks = (rank, (rank - 1) % size) if copies and size > 1 else (rank,)
    return HeldShards(generation, size, ranks, **{"steps": 5, **when})


def test_the_latest_division_that_is_whole_is_taken_from_those_whose_own_it_is():
    before = [held(3, 3, rank, copies=1) for rank in range(3)]
    after = [held(4, 2, rank, copies=0) for rank in range(2)]
    assert find_shards([[before[0]], [before[1]]], 5) == ShardSource(3, (0, 1, 0))
    assert find_shards([[before[0]], [before[1], after[1]], []], 5) == ShardSource(3, (0, 1, 0))
    assert find_shards([[after[0]], [before[1], after[1]]], 5) == ShardSource(4, (0, 1))
    assert find_shards([[], [before[1]]], 5) is None


def test_shards_of_the_step_before_count_if_it_can_be_redone():
    for redoable in (False, True):
        several = [[held(0, 2, 0, 0, steps=6)], [held(0, 2, 1, 0, redoable=redoable)]]
        assert (find_shards(several, 6) is not None) == redoable


def test_all_must_shard_or_none():
    with pytest.raises(ProgramMismatchError, match="same `shard_optimizer`"):
        agree([FitProgress(shards=(held(0, 2, 0, 0),)), FitProgress()])


class Worker:
    """One worker in a history.

    Args:
        divisions: what it holds: the generation, the number of ranks and its own.
        is_new: whether it has not taken a state over so far.
    """

    def __init__(self, divisions: list[tuple[int, int, int]], *, is_new: bool) -> None:
        self.divisions, self.is_new = divisions, is_new

    def standing(self, copies: int, steps: int, redoable: bool) -> FitProgress:
        shards = [
            held(*division, copies, steps=steps, redoable=redoable) for division in self.divisions
        ]
        return FitProgress(is_new=self.is_new, steps=steps, shards=tuple(shards))

    def has(self, copies: int) -> set[tuple[int, int, int]]:
        own = set(self.divisions)
        return own | {(g, n, (rank - 1) % n) for g, n, rank in own if copies}


@pytest.mark.parametrize("copies", [0, 1])
def test_shards_are_lost_only_with_all_who_had_them(copies):
    """Workers die and come; steps stand on some only; changes of the group are cut short."""
    choose, ends = random.Random(copies), {True: 0, False: 0}
    for _ in range(5000):
        size = choose.randint(1, 5)
        group = [Worker([(0, size, rank)], is_new=False) for rank in range(size)]
        is_training = True
        for generation in range(1, 7):
            # On some, the last step has been taken back.
            late = [is_training and choose.random() < 0.3 for _ in group]
            left = [pair for pair in zip(group, late, strict=True) if choose.random() < 0.85]
            if all(worker.is_new for worker, _ in left):
                break
            left += [(Worker([], is_new=True), False) for _ in range(choose.choice([0, 0, 1, 2]))]
            group = [worker for worker, _ in left]
            standings = [worker.standing(copies, 5 - behind, behind) for worker, behind in left]
            everything = set().union(*(worker.has(copies) for worker in group))
            whole = {
                (g, n)
                for g, n, _ in everything
                if all((g, n, rank) in everything for rank in range(n))
            }
            ends[bool(whole)] += 1
            if not whole:
                with pytest.raises(GroupLostError, match=r"Elastic\(copies=1\)"):
                    agree(standings)
                break
            source = agree([FitProgress.from_json(one.to_json()) for one in standings]).shards
            division = source.generation, len(source.senders)
            assert division == max(whole)
            for rank, sender in enumerate(source.senders):
                assert (*division, rank) in group[sender].has(copies)
            is_training = choose.random() < 0.7
            for rank, worker in enumerate(group):
                new = (generation, len(group), rank)
                if is_training:
                    worker.divisions, worker.is_new = [new], False
                elif choose.random() < 0.5:  # cut short: some have taken over what they are to hold
                    worker.divisions = [*worker.divisions, new]
    assert min(ends.values()) > 500
