"""Which snapshot is resumed from, and who sends what: tables and random inventories."""

from __future__ import annotations

import random

from tfdist._src.snapshots.restore import SnapshotId, candidates

OLD, NEW = SnapshotId(10, "a", 2), SnapshotId(20, "a", 2)
LATER_RUN, OF_THREE = SnapshotId(10, "b", 2), SnapshotId(30, "a", 3)


ORDERS = [
    ([], []),
    ([{}], []),
    ([{OLD: [0, 1], NEW: [0, 1]}], [NEW, OLD]),
    ([{OLD: [0], NEW: [0]}, {OLD: [1], NEW: [1]}], [NEW, OLD]),
    ([{OLD: [0, 1], NEW: [0]}, {}], [OLD, NEW]),
    ([{OLD: [0, 1]}, {LATER_RUN: [0, 1]}], [LATER_RUN, OLD]),
    ([{OF_THREE: [0, 1], OLD: [0, 1]}], [OLD, OF_THREE]),
    ([{OF_THREE: [0, 1]}, {OF_THREE: [2]}], [OF_THREE]),
]


def test_the_newest_complete_one_comes_first():
    for inventories, order in ORDERS:
        assert [candidate.snapshot for candidate in candidates(inventories)] == order


def test_what_not_all_can_read_is_sent_by_the_first_that_can():
    (found,) = candidates([{NEW: [1]}, {NEW: [0, 1]}, {NEW: [0, 1]}])
    assert found.to_send == {0: 1}
    assert found.missing == []


def test_candidates_of_random_inventories_name_holders_and_senders():
    numbers = random.Random(3)
    for _ in range(300):
        workers = numbers.randrange(1, 5)
        snapshots = [SnapshotId(numbers.randrange(5), "r", numbers.randrange(1, 4)) for _ in "abc"]
        inventories = [
            {
                s: sorted(numbers.sample(range(s.size), numbers.randrange(1, s.size + 1)))
                for s in snapshots
                if numbers.random() < 0.6
            }
            for _ in range(workers)
        ]
        found = candidates(inventories)
        assert {c.snapshot for c in found} == {s for inventory in inventories for s in inventory}
        complete = [c.is_complete for c in found]
        assert complete == sorted(complete, reverse=True)
        for candidate in found:
            for part, holders in candidate.holders.items():
                assert all(part in inventories[w][candidate.snapshot] for w in holders)
            assert set(candidate.missing) | set(candidate.holders) == set(
                range(candidate.snapshot.size)
            )
            for part, sender in candidate.to_send.items():
                assert sender in candidate.holders[part]
