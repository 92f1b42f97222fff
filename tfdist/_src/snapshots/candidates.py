"""Which snapshot to resume from, and who reads which of its parts: a pure decision."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfdist._src.snapshots.snapshot_folder import SnapshotId

Inventory = Mapping[SnapshotId, Sequence[int]]
"""The snapshots that a worker can see, and the ranks whose parts it can read."""


@dataclass(frozen=True)
class Candidate:
    """A snapshot that may be resumed from.

    Attributes:
        snapshot: which one.
        holders: for each part that exists, by its rank when it was written, the workers of today
            that can read it, in order.
        workers: how many workers there are today.
    """

    snapshot: SnapshotId
    holders: Mapping[int, Sequence[int]]
    workers: int

    @property
    def is_complete(self) -> bool:
        """Whether all of its parts exist."""
        return len(self.holders) == self.snapshot.size

    @property
    def missing(self) -> list[int]:
        """The ranks whose parts are nowhere."""
        return [rank for rank in range(self.snapshot.size) if rank not in self.holders]

    @property
    def to_send(self) -> dict[int, int]:
        """For each part that some worker cannot read, the worker that sends it."""
        return {
            part: holders[0]
            for part, holders in sorted(self.holders.items())
            if len(holders) < self.workers
        }


def candidates(inventories: Sequence[Inventory]) -> list[Candidate]:
    """The snapshots that the workers can put together, the best first.

    Complete ones come before others, since these lack what a worker alone held; then the newest.

    Args:
        inventories: what each worker can see, in rank order.

    Example:
        >>> old, new = SnapshotId(10, "a", 2), SnapshotId(20, "a", 2)
        >>> [c.snapshot.step for c in candidates([{old: [0, 1], new: [0]}, {old: [1]}])]
        [10, 20]
    """
    found: defaultdict[SnapshotId, defaultdict[int, list[int]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for worker, inventory in enumerate(inventories):
        for snapshot, parts in inventory.items():
            for part in parts:
                found[snapshot][part].append(worker)
    several = [Candidate(s, dict(holders), len(inventories)) for s, holders in found.items()]
    return sorted(several, key=lambda c: (c.is_complete, c.snapshot), reverse=True)
