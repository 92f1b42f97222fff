"""Decides which step a new group continues from, and which workers send their state."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import keras

from tfdist._src.cluster import Membership
from tfdist._src.keras.saving.files import is_pipeline_model
from tfdist._src.snapshots.shard_state import HeldShards, ShardSource, find_shards
from tfdist._src.strategy.commit_point import Progress
from tfdist._src.strategy.extended import extended_of
from tfdist.errors import GroupLostError, ProgramMismatchError, UnsupportedError


class _Grid(Protocol):
    """The protocol for the arrangement of ranks in pipelines, which `RankMesh` implements."""

    @property
    def data_groups(self) -> Sequence[Sequence[int]]:
        """For each part of the model, the ranks that hold the stages of this part."""

    def data_group_of(self, rank: int) -> Sequence[int]:
        """Returns the ranks that hold the same stages as the given rank."""


class _Arrangement(Protocol):
    """The protocol for the pipelines of a new group, which `Arrangement` implements."""

    @property
    def spare(self) -> Sequence[int]:
        """The ranks that are in no pipeline."""

    @property
    def missing(self) -> Sequence[int]:
        """The pipeline ranks (positions in a pipeline) that no worker holds."""


class _Pipelines(Protocol):
    """The members of `PipelineExtended` that this module uses without importing `pipeline`."""

    progress: Progress
    full_size: int

    @property
    def mesh(self) -> _Grid:
        """The mesh of the current group."""

    def follow_group(self) -> _Arrangement:
        """Forms pipelines from the workers of the new group."""


class StagesMissing(Exception):
    """No pipeline can be formed, since no worker holds some of the stages.

    Attributes:
        missing: the pipeline ranks (positions in a pipeline) that no worker holds.
    """

    def __init__(self, missing: Sequence[int], stages: Sequence[int]) -> None:
        super().__init__(
            f"only lost workers held stage {', '.join(map(str, stages))} of the model, and no "
            "other pipeline is complete."
        )
        self.missing = missing

    @property
    def without_others(self) -> str:
        """The error message for the case that no other workers join."""
        return (
            f"Training cannot continue: {self} Start a replacement for the lost worker, or restart "
            "the job with tfdist.callbacks.BackupAndRestore to continue from a snapshot."
        )


class GroupShrinks(Exception):
    """Some workers leave the group, because they are in no pipeline or have received SIGTERM.

    Attributes:
        ranks: the ranks that leave.
    """

    def __init__(self, ranks: Collection[int]) -> None:
        super().__init__(f"{len(ranks)} workers leave")
        self.ranks = ranks


class Stages:
    """The pipeline stages of a model in training.

    A process holds the same stages until it ends. A group trains in as many pipelines as its
    workers can fill, and all other workers leave the group. Workers that have left may join again
    as new workers, together with replacements for the lost workers.

    Args:
        model: the model in training. For a model without stages, the methods do nothing.

    Attributes:
        group: the workers.
        divided: whether the model is divided into stages.

    Raises:
        UnsupportedError: the model was cut by the measured times of its layers, so a joining worker
            could not determine the stages by itself.
    """

    def __init__(self, model: keras.Model) -> None:
        self._strategy = model.distribute_strategy
        self.divided = is_pipeline_model(model)
        self.group = extended_of(self._strategy).group
        if not self.divided:
            return
        if model.is_cut_by_time:
            raise UnsupportedError(
                "With Elastic, a joining worker must determine the stages by itself. Received: a "
                "PipelineModel that was cut by the measured times of its layers. Pass `cuts` or "
                '`balance="parameters"` to it.'
            )
        self._pipelines.progress.redoable = True

    @property
    def _pipelines(self) -> _Pipelines:
        pipelines: _Pipelines = self._strategy.extended
        return pipelines

    def most(self, workers: int | None) -> int | None:
        """Returns the maximum number of workers in a group.

        Args:
            workers: the maximum that the user has set; None for any number.
        """
        if not self.divided:
            return workers
        full = self._pipelines.full_size
        each = self._strategy.pipeline_size
        return full if workers is None else min(full, workers // each * each)

    def follow_group(self, membership: Membership | None) -> None:
        """Forms pipelines from the workers of the new group.

        All workers must call this method.

        Args:
            membership: this worker's membership, which is closed if this worker has to leave.

        Raises:
            StagesMissing: the workers cannot form a single pipeline.
            GroupLostError: this worker is no longer in any pipeline.
            GroupShrinks: other workers are in no pipeline, and leave.
        """
        if not self.divided:
            return
        arrangement = self._pipelines.follow_group()
        if missing := arrangement.missing:
            raise StagesMissing(missing, [s for p in missing for s in self._strategy.stages_of(p)])
        topology = self.group.topology
        if topology.rank in arrangement.spare:
            if membership is not None:
                membership.close()
            self.group.close()
            raise GroupLostError(
                f"{topology.me} leaves: too few workers remain for its pipeline, and they continue "
                "without it. Start it again, together with the lost workers, to join them."
            )
        if arrangement.spare:
            raise GroupShrinks(arrangement.spare)

    def alike(self) -> Sequence[Sequence[int]] | None:
        """Returns the ranks that hold each part of the model; None if all hold the whole model."""
        if not self.divided:
            return None
        return self._pipelines.mesh.data_groups

    def position_of(self, rank: int) -> int:
        """Returns a rank's position among the workers that hold the same stages as this worker."""
        if not self.divided:
            return rank
        return self._pipelines.mesh.data_group_of(self.group.topology.rank).index(rank)


@dataclass(frozen=True)
class FitProgress:
    """The position of a worker in its call of `fit`, between two steps.

    Attributes:
        is_new: whether the worker has just joined, and has no state yet.
        is_torn: whether the worker's state matches no step.
        can_redo: whether the worker can redo the step after its last committed step. It has to do
            this if another worker has committed that step.
        steps: the number of training steps that the worker has committed.
        epochs_ended: the number of epochs that have ended for all callbacks of the worker.
        seen: the number of the worker's callbacks that were already called at the end of the last
            batch.
        came_later: whether the worker joined during this call of `fit`.
        shards: the worker's shards of a sharded optimizer; None if the optimizer is not sharded.
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
        """Serializes the position for the other workers."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> FitProgress:
        """Returns the position that another worker has serialized."""
        fields = json.loads(text)
        if fields["shards"] is not None:
            several = [{**held, "ranks": tuple(held["ranks"])} for held in fields["shards"]]
            fields["shards"] = tuple(HeldShards(**held) for held in several)
        return cls(**fields)


@dataclass(frozen=True)
class Agreement:
    """The common position that the workers continue from.

    Attributes:
        steps: the number of committed training steps.
        source: the rank that sends the position in `fit` and the states of callbacks to new
            workers.
        sources: for each rank, the rank that sends the state of the same part of the model.
        takers: the ranks that receive state.
        redo: the ranks that redo a step, which they have rolled back but others have committed.
        newcomers: the ranks that have just joined.
        epoch: the epoch that all workers enter.
        seen: the largest number of callbacks that a worker had already called at the end of the
            last batch.
        shards: the workers that send the state of a sharded optimizer; None if the optimizer is
            not sharded.
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


def agree(
    everyone: Sequence[FitProgress], alike: Sequence[Sequence[int]] | None = None
) -> Agreement:
    """Decides how the workers continue; the result is the same on all workers.

    A worker commits a step only after it has received all values of the step from the other
    workers, so a step that any worker has committed counts as committed for all. No worker enters
    an epoch before all callbacks have seen the end of the previous epoch.

    Args:
        everyone: the positions of all workers, in rank order.
        alike: for each part of the model, the ranks that hold the part; by default, all ranks hold
            the whole model.

    Raises:
        GroupLostError: no worker has a consistent state, the state of a part of the model is lost,
            or shards of the optimizer are lost.
        ProgramMismatchError: the optimizer is sharded on some workers, but not on others.

    Example:
        >>> agree([FitProgress(steps=7), FitProgress(steps=8), FitProgress(is_new=True)]).takers
        frozenset({0, 2})
    """
    whole = {r: s for r, s in enumerate(everyone) if not s.is_new and not s.is_torn}
    if not whole:
        raise GroupLostError(
            "No remaining worker has the training state: all workers that had it are lost. Restart "
            "the job with tfdist.callbacks.BackupAndRestore to continue from a snapshot."
        )
    steps = max(one.steps for one in whole.values())
    shards = _find_shards([one.shards for one in everyone], steps)
    newest = [rank for rank, one in whole.items() if one.steps == steps]
    redo = {rank for rank, one in whole.items() if one.steps == steps - 1 and one.can_redo}
    having = redo | set(newest)
    sources = [0] * len(everyone)
    for ranks in alike or [range(len(everyone))]:
        source = next((rank for rank in ranks if rank in having), None)
        if source is None:
            raise GroupLostError(
                "Only lost workers held some stages of the model. Restart the job with "
                "tfdist.callbacks.BackupAndRestore to continue from a snapshot."
            )
        for rank in ranks:
            sources[rank] = source
    members = [one for one in everyone if not one.is_new]
    return Agreement(
        steps=steps,
        source=newest[0],
        sources=tuple(sources),
        takers=frozenset(range(len(everyone))) - having,
        redo=frozenset(redo),
        newcomers=frozenset(rank for rank, one in enumerate(everyone) if one.is_new),
        epoch=min(one.epochs_ended for one in members),
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
            "Only lost workers held a part of the sharded optimizer's state. Restart the job with "
            "tfdist.callbacks.BackupAndRestore to continue from a snapshot, and with "
            "tfdist.callbacks.Elastic(copies=1), which keeps a copy of each part on another worker."
        )
    return found
