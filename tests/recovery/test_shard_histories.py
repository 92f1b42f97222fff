"""Where the shards of an optimizer's state come from when workers are lost and others come."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from tests.harness.tiers import exhaustive
from tfdist._src.recovery.agreement import FitProgress, agree
from tfdist._src.snapshots.shard_state import HeldShards, find_shards
from tfdist.errors import GroupLostError, ProgramMismatchError

HISTORIES = 10_000

pytestmark = exhaustive


def ring(size, **how):
    """What each worker of a group holds, with a copy of what the one before it holds."""
    return [
        HeldShards(generation=3, size=size, ranks=(rank, (rank - 1) % size), steps=7, **how)
        for rank in range(size)
    ]


def test_what_a_lost_worker_held_is_sent_by_its_neighbour():
    first, _, third, fourth = ring(4)
    assert find_shards([[third], [], [fourth], [first]], 7).senders == (3, 0, 0, 2)
    assert find_shards([[third], [fourth]], 7) is None
    assert find_shards([[first], [third], [fourth]], 8) is None


def test_a_step_that_stands_elsewhere_is_redone():
    undone, stands = ring(2, redoable=True)[0], HeldShards(3, 2, (1, 0), steps=8)
    assert find_shards([[undone], [stands]], 8).senders == (0, 1)
    assert find_shards([[ring(2)[0]], [stands]], 8).senders == (1, 1)
    assert find_shards([[ring(2)[0]], [ring(2)[1]]], 8) is None


def test_the_latest_division_counts():
    new = HeldShards(4, 1, (0,), 7)
    assert find_shards([[*ring(1), new]], 7).generation == 4


def test_some_who_do_not_shard_are_refused():
    with pytest.raises(ProgramMismatchError, match="the same `shard_optimizer`"):
        agree([FitProgress(steps=7, shards=tuple(ring(1))), FitProgress(is_new=True)])


@dataclass(eq=False)
class Division:
    """What a worker holds in a division: after how many steps it is the state, in truth."""

    generation: int
    size: int
    ranks: tuple[int, ...]
    value: int
    undone: int | None = None


@dataclass(eq=False)
class Worker:
    """As `ShardState` and `Recovery` do it."""

    now: Division
    steps: int = 0
    joins: bool = False
    torn: bool = False
    whole: bool = True
    has_undone: bool = False
    before: list[Division] = field(default_factory=list)
    at: int | None = None
    redoable: bool = False

    def standing(self):
        if self.at is None:
            self.at, self.redoable = self.steps, self.has_undone
        if self.whole and self.now not in self.before:
            self.before.append(self.now)
        held = tuple(
            HeldShards(d.generation, d.size, d.ranks, self.at, self.redoable) for d in self.before
        )
        if self.joins:
            return FitProgress(is_new=True, shards=held)
        return FitProgress(is_torn=self.torn, steps=self.steps, shards=held)

    def change(self, now, steps, takes, progress):
        """Gets as far as `progress` says in a change of the group."""
        if progress >= 1:
            self.whole, self.now = False, now
            self.torn |= takes
        if progress >= 2:
            if self.redoable and steps != self.at:
                for division in self.before:
                    division.value, division.undone = division.undone, None
                self.has_undone = False
            self.at, self.redoable = steps, False
        if progress >= 3:
            self.whole, now.value = True, steps
        if progress >= 4:
            self.steps, self.torn, self.joins = steps, False, False
            self.has_undone, self.at = False, None
            self.before.clear()


def division(rank, size, generation, copies, value=-1):
    holds = (rank, (rank - 1) % size) if copies and size > 1 else (rank,)
    return Division(generation, size, holds, value)


def gives(worker, generation, steps):
    """Whose shards a worker can give in truth, of a division and after so many steps."""
    found = [d for d in worker.before if d.generation == generation]
    return {rank for d in found if steps in (d.value, d.undone) for rank in d.ranks}


def lose_some(choose, workers):
    count = choose.choices(range(len(workers) + 1), [6, 6, *[1] * (len(workers) - 1)])[0]
    return choose.sample(workers, count)


def train(choose, workers):
    """Some steps, and one that fails on some workers, which may have been undone there."""
    for worker in workers:
        worker.steps += 3
        worker.now.value += 3
    lost = lose_some(choose, workers)
    stands = choose.random() < 0.5
    for worker in workers:
        if stands and choose.random() < 0.5:
            worker.steps += 1
            worker.now.value += 1
        else:
            worker.has_undone = True
            # If the step stands nowhere, this may be anything.
            worker.now.undone = worker.steps + 1 if stands else choose.choice([None, -2])
    return [worker for worker in workers if worker not in lost]


def change(choose, workers, generation, copies):
    """A change of the group, in which more workers may be lost.

    Returns:
        Those that are left, and whether all of them go on.
    """
    workers = [*workers, *(newcomer() for _ in range(choose.choice([0, 0, 1, 2])))]
    standings = [FitProgress.from_json(worker.standing().to_json()) for worker in workers]
    try:
        agreement = agree(standings)
    except GroupLostError:
        whole = [w.steps for w in workers if not w.joins and not w.torn]
        if whole:
            for one in {d.generation: d for w in workers for d in w.before}.values():
                found = [gives(w, one.generation, max(whole)) for w in workers]
                assert set().union(*found) != set(range(one.size))
        return [], False
    source = agreement.shards
    for rank, sender in enumerate(source.senders):
        assert rank in gives(workers[sender], source.generation, agreement.steps)
    lost = lose_some(choose, workers) if choose.random() < 0.5 else []
    reached = {id(w): choose.choice([0, 1, 2, 3]) if lost else 4 for w in workers}
    if lost and min(reached.values()) >= 3:
        reached = {id(w): choose.choice([3, 4]) for w in workers}
    for rank, worker in enumerate(workers):
        new = division(rank, len(workers), generation, copies)
        worker.change(new, agreement.steps, rank in agreement.takers, reached[id(worker)])
    return [worker for worker in workers if worker not in lost], not lost


def newcomer():
    return Worker(division(0, 1, 0, copies=False), joins=True, whole=False)


@pytest.mark.parametrize("copies", [False, True])
def test_whoever_is_lost_and_comes_right_shards_are_found_if_there_are_any(copies):
    choose, changes = random.Random(copies), 0
    for _ in range(HISTORIES):
        size, generation = choose.randint(1, 5), 1
        workers = [Worker(division(r, size, generation, copies, value=0)) for r in range(size)]
        for _ in range(4):
            workers, goes_on = train(choose, workers), False
            while workers and not goes_on:
                generation += 1
                workers, goes_on = change(choose, workers, generation, copies)
            if not workers:
                break
            changes += 1
            assert len({worker.steps for worker in workers}) == 1
            assert all(worker.now.value == worker.steps for worker in workers)
    assert changes > HISTORIES / 3
