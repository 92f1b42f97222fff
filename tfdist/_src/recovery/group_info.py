"""What callbacks are told of a group of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tfdist._src.cluster import Topology
from tfdist._src.cluster.net.wait_messages import say
from tfdist._src.keras.saving.callbacks import become_writer


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


def tell_of_change(callbacks: Sequence[Any], before: Topology, now: Topology) -> None:
    """Tells callbacks that the group has changed; those of a new chief take over its files.

    Args:
        callbacks: in their order.
        before: the group that they know.
        now: the present one.
    """
    old, new = GroupInfo.of(before), GroupInfo.of(now)
    for callback in callbacks:
        if old.rank != 0 and new.rank == 0:
            become_writer(callback)
        tell = getattr(callback, "on_group_change", None)
        if tell is not None:
            tell(old, new)


def report_change(
    before: Topology,
    now: Topology,
    steps: int,
    seconds: float,
    rows: int,
    *,
    own: bool,
    lost: bool,
) -> None:
    """Has rank 0 say that training goes on.

    Args:
        before: the group that trained.
        now: the present one.
        steps: how many stand.
        seconds: how long the change took.
        rows: of a global batch, if they have changed; otherwise 0.
        own: whether each worker reads batches of its own.
        lost: whether a worker was lost.
    """
    if now.rank == 0:
        batch = f" The global batch has {rows} rows now." if rows else ""
        say(
            f"tfdist: training goes on with {now.size} workers, formerly {before.size}, after "
            f"{steps} steps; the change took {seconds:.1f} s.{batch}"
        )
        if own:
            say(
                "tfdist: each worker reads data of its own. What the lost ones had yet to read in "
                "this epoch is left out, as are the batches of the step in which they were lost; "
                "the next epoch is shared out among all workers again."
                if lost
                else "tfdist: each worker reads data of its own, so new ones read nothing before "
                "the next epoch, which is shared out among all workers again."
            )
