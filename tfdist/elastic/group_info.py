"""What callbacks are told of a group of workers."""

from __future__ import annotations

from dataclasses import dataclass

from tfdist.cluster import Topology


@dataclass(frozen=True)
class GroupInfo:
    """A group of workers, as one of them sees it.

    Attributes:
        generation: how often the group had changed before.
        rank: this worker's rank.
        size: the number of workers.
        workers: their names in rank order, such as `"worker 1 (10.0.0.2:2222)"`.
    """

    generation: int
    rank: int
    size: int
    workers: tuple[str, ...]

    @classmethod
    def of(cls, topology: Topology) -> GroupInfo:
        """The group of a topology."""
        names = tuple(str(worker) for worker in topology.workers)
        return cls(topology.generation, topology.rank, topology.size, names)
