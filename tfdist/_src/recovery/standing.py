"""What the workers of a new group agree on: which step stands, and who takes whose state."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass

from tfdist._src.snapshots.shard_state import HeldShards, ShardSource, find_shards
from tfdist.errors import GroupLostError, ProgramMismatchError


@dataclass(frozen=True)
class Standing:
    """Where a worker is in its call of `fit`, between two steps.

    Attributes:
        is_new: whether it has just joined, and knows nothing.
        is_torn: whether its state is that after no step.
        can_redo: whether it can have the step behind those that stand, if another worker has it.
        steps: how many steps of training stand on it.
        epochs_ended: of how many epochs all of its callbacks have seen the end.
        seen: how many of its callbacks have seen the end of the last batch.
        came_later: whether it joined in this call of `fit`.
        shards: what it holds of a sharded optimizer; None if the optimizer is not sharded.
    """

    is_new: bool = False
    is_torn: bool = False
    can_redo: bool = False
    steps: int = 0
    epochs_ended: int = 0
    seen: int = 0
    came_later: bool = False
    shards: tuple[HeldShards, ...] | None = None

    def to_json(self) -> str:
        """The standing as a text for the other workers."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Standing:
        """The standing that another worker has sent."""
        fields = json.loads(text)
        if fields["shards"] is not None:
            several = [{**held, "ranks": tuple(held["ranks"])} for held in fields["shards"]]
            fields["shards"] = tuple(HeldShards(**held) for held in several)
        return cls(**fields)


@dataclass(frozen=True)
class Agreement:
    """How the workers go on.

    Attributes:
        steps: how many steps of training stand.
        source: the rank that knows where training stands.
        sources: for each rank the one with the same part of the model whose state it takes.
        takers: the ranks that take a state.
        redo: the ranks that redo their last step.
        newcomers: those of them that have just joined.
        epoch: the epoch that all of them enter.
        seen: how many callbacks have seen the end of the last batch on any worker.
        shards: where the state of a sharded optimizer comes from; None if it is not sharded.
    """

    steps: int
    source: int
    sources: tuple[int, ...]
    takers: frozenset[int]
    redo: frozenset[int]
    newcomers: frozenset[int]
    epoch: int
    seen: int
    shards: ShardSource | None = None


def agree(standings: Sequence[Standing], alike: Sequence[Sequence[int]] | None = None) -> Agreement:
    """Decides how the workers go on, the same on all of them.

    A step that stands on any worker has received all it needed from all, so it stands for all. No
    worker enters a later epoch than one whose callbacks have not seen the end of the one before.

    Args:
        standings: those of all workers, in rank order.
        alike: the ranks that hold the same part of the model, for each part; by default all hold
            all of it.

    Raises:
        GroupLostError: no worker has a whole state, nobody that of some part of the model, or
            shards of the optimizer are lost.
        ProgramMismatchError: the optimizer of some is sharded, and that of others is not.

    Example:
        >>> agree([Standing(steps=7), Standing(steps=8), Standing(is_new=True)]).takers
        frozenset({0, 2})
    """
    whole = {r: s for r, s in enumerate(standings) if not s.is_new and not s.is_torn}
    if not whole:
        raise GroupLostError(
            "No worker that is left has the state of the training: what had it is lost. Start the "
            "job again, with tfdist.callbacks.BackupAndRestore to go on from a snapshot."
        )
    steps = max(standing.steps for standing in whole.values())
    shards = _find_shards([standing.shards for standing in standings], steps)
    newest = [rank for rank, standing in whole.items() if standing.steps == steps]
    redo = {rank for rank, one in whole.items() if one.steps == steps - 1 and one.can_redo}
    having = redo | set(newest)
    sources = [0] * len(standings)
    for ranks in alike or [range(len(standings))]:
        source = next((rank for rank in ranks if rank in having), None)
        if source is None:
            raise GroupLostError(
                "Stages of the model were held by lost workers only. Start the job again, with "
                "tfdist.callbacks.BackupAndRestore to go on from a snapshot."
            )
        for rank in ranks:
            sources[rank] = source
    members = [standing for standing in standings if not standing.is_new]
    return Agreement(
        steps=steps,
        source=newest[0],
        sources=tuple(sources),
        takers=frozenset(range(len(standings))) - having,
        redo=frozenset(redo),
        newcomers=frozenset(rank for rank, standing in enumerate(standings) if standing.is_new),
        epoch=min(standing.epochs_ended for standing in members),
        seen=max(whole[rank].seen for rank in newest),
        shards=shards,
    )


def _find_shards(held: Sequence[tuple[HeldShards, ...] | None], steps: int) -> ShardSource | None:
    sharded = [shards for shards in held if shards is not None]
    if not sharded:
        return None
    if len(sharded) < len(held):
        raise ProgramMismatchError(
            "The workers do not run the same program: some shard their optimizer, and others do "
            "not. Pass the same `shard_optimizer` to the strategy of all workers."
        )
    found = find_shards(sharded, steps)
    if found is None:
        raise GroupLostError(
            "A part of the sharded optimizer's state was held by lost workers only. Start the job "
            "again, with tfdist.callbacks.BackupAndRestore to go on from a snapshot, and with "
            "tfdist.callbacks.Elastic(copies=1), which keeps a copy of each part on another worker."
        )
    return found
