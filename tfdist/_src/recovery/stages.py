"""What it takes to go on in another group where the workers hold stages of the model."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import keras

from tfdist._src.cluster import Membership
from tfdist._src.group import Group
from tfdist._src.keras.saving.files import in_stages
from tfdist.errors import GroupLostError, UnsupportedError


class StagesMissing(Exception):
    """No pipeline can be formed, since nobody holds some of the stages.

    Attributes:
        missing: the pipeline ranks that nobody has.
    """

    def __init__(self, missing: Sequence[int], stages: Sequence[int]) -> None:
        super().__init__(
            f"stage {', '.join(map(str, stages))} of the model was held by lost workers only, and "
            "no other pipeline is whole."
        )
        self.missing = missing

    @property
    def without_others(self) -> str:
        """What is said if no other workers come."""
        return (
            f"Training cannot go on: {self} Start a new worker in the place of the lost one, or "
            "the job again, with tfdist.callbacks.BackupAndRestore to go on from a snapshot."
        )


class OthersLeave(Exception):
    """Some workers of the group leave it: they are in no pipeline, or were asked to by SIGTERM.

    Attributes:
        ranks: those that leave.
    """

    def __init__(self, ranks: Collection[int]) -> None:
        super().__init__(f"{len(ranks)} workers leave")
        self.ranks = ranks


class Stages:
    """The stages of a model in training, of which each worker holds some for as long as it lives.

    A group trains in as many pipelines as it has workers for. Those that are left over leave, and
    may come again as new workers do, together with the ones that are missing.

    Args:
        model: in training; without stages, all of this does nothing.

    Attributes:
        group: the workers.
        divided: whether there are any.

    Raises:
        UnsupportedError: a worker that comes could not find the stages by itself.
    """

    def __init__(self, model: keras.Model) -> None:
        self._strategy = model.distribute_strategy
        self.divided = in_stages(model)
        self.group: Group = self._strategy.extended.group
        if not self.divided:
            return
        if model.is_cut_by_time:
            raise UnsupportedError(
                "Elastic needs stages that a worker that comes finds by itself. Received: a "
                "PipelineModel that was cut by the time that its layers take here. Pass "
                '`cuts` or `balance="parameters"` to it.'
            )
        self._strategy.extended.progress.redoable = True

    def most(self, workers: int | None) -> int | None:
        """The most workers that a group may admit.

        Args:
            workers: as many as it may otherwise; None for any number.
        """
        if not self.divided:
            return workers
        full: int = self._strategy.extended.full_size
        each = self._strategy.pipeline_size
        return full if workers is None else min(full, workers // each * each)

    def follow_group(self, membership: Membership | None) -> None:
        """Forms pipelines of the workers of another group; all of them call this together.

        Args:
            membership: this worker's, which ends if it has to leave.

        Raises:
            StagesMissing: they cannot form a single one.
            GroupLostError: this worker is in no pipeline any more.
            OthersLeave: others are in none, and leave.
        """
        if not self.divided:
            return
        arrangement = self._strategy.extended.follow_group()
        if missing := arrangement.missing:
            raise StagesMissing(missing, [s for p in missing for s in self._strategy.stages_of(p)])
        topology = self.group.topology
        if topology.rank in arrangement.spare:
            if membership is not None:
                membership.close()
            self.group.close()
            raise GroupLostError(
                f"{topology.me} leaves: the workers that are left are too few for its pipeline, "
                "and go on without it. Start it again to join them, together with the lost ones."
            )
        if arrangement.spare:
            raise OthersLeave(arrangement.spare)

    def alike(self) -> Sequence[Sequence[int]] | None:
        """The ranks that hold the same stages, for each; None if all hold the whole model."""
        if not self.divided:
            return None
        groups: Sequence[Sequence[int]] = self._strategy.extended.mesh.data_groups
        return groups

    def position_of(self, rank: int) -> int:
        """The number of a rank in the communicator of those with this worker's stages."""
        if not self.divided:
            return rank
        mesh = self._strategy.extended.mesh
        return int(mesh.data_group_of(self.group.topology.rank).index(rank))
