"""The arrangement of ranks in pipelines, at the start of a job and after workers have changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankMesh:
    """The mesh of a job: its ranks along the axes `data` and `pipeline`.

    Ranks that hold the same stages sum their gradients, so these ranks are adjacent, and on the
    same host if possible. Stages exchange fewer bytes, so their messages may cross hosts.

    Attributes:
        pipelines: for each position on the data axis, the job's ranks along the pipeline axis.

    Example:
        >>> mesh = RankMesh.of_hosts([0, 0, 1, 1], pipeline_size=2)
        >>> mesh.pipelines
        ((0, 2), (1, 3))
        >>> mesh.data_group_of(3)
        (2, 3)
    """

    pipelines: tuple[tuple[int, ...], ...]

    @classmethod
    def of_hosts(cls, hosts: Sequence[int], pipeline_size: int) -> RankMesh:
        """Makes the mesh of a job.

        Args:
            hosts: for each rank of the job, the index of its host.
            pipeline_size: the number of ranks per pipeline.

        Raises:
            ValueError: the ranks do not divide evenly into pipelines.
        """
        if pipeline_size < 1 or len(hosts) % pipeline_size:
            raise ValueError(
                f"The number of workers must be a multiple of `pipeline_size`. Received: "
                f"pipeline_size={pipeline_size} for {len(hosts)} workers. Change the number of "
                "workers or `pipeline_size`."
            )
        pipeline_count = len(hosts) // pipeline_size
        order = sorted(range(len(hosts)), key=lambda rank: (hosts[rank], rank))
        return cls(tuple(tuple(order[i::pipeline_count]) for i in range(pipeline_count)))

    @classmethod
    def of_one(cls, pipeline_rank: int, pipeline_size: int) -> RankMesh:
        """Makes the mesh of a group of one worker: its rank is 0, and -1 stands for missing ranks.

        Args:
            pipeline_rank: the pipeline rank.
            pipeline_size: the number of ranks per pipeline.
        """
        return cls((tuple(0 if p == pipeline_rank else -1 for p in range(pipeline_size)),))

    def __str__(self) -> str:
        return f"{self.pipeline_count}x{self.pipeline_size}"

    @property
    def pipeline_count(self) -> int:
        """The number of pipelines."""
        return len(self.pipelines)

    @property
    def pipeline_size(self) -> int:
        """The number of ranks per pipeline."""
        return len(self.pipelines[0])

    def pipeline_of(self, rank: int) -> tuple[int, ...]:
        """Returns the job's ranks in the pipeline of a rank."""
        return next(ranks for ranks in self.pipelines if rank in ranks)

    def pipeline_rank_of(self, rank: int) -> int:
        """Returns a rank's position in its pipeline."""
        return self.pipeline_of(rank).index(rank)

    @property
    def data_groups(self) -> tuple[tuple[int, ...], ...]:
        """For each pipeline rank, the job's ranks with this number; they hold the same stages."""
        return tuple(zip(*self.pipelines, strict=True))

    def data_group_of(self, rank: int) -> tuple[int, ...]:
        """Returns the job's ranks that hold the same stages as a rank."""
        return self.data_groups[self.pipeline_rank_of(rank)]


@dataclass(frozen=True)
class Arrangement:
    """The pipelines of a group after its workers have changed.

    Attributes:
        mesh: the pipelines; None if no pipeline is complete.
        spare: the ranks without a pipeline, since other ranks of their pipeline are lost.
        missing: the pipeline ranks that no worker has.
    """

    mesh: RankMesh | None
    spare: tuple[int, ...]
    missing: tuple[int, ...]


def arrange(pipeline_ranks: Sequence[int], pipeline_size: int) -> Arrangement:
    """Forms the largest possible number of pipelines; every worker keeps its stages.

    Args:
        pipeline_ranks: for each rank of the job, its pipeline rank.
        pipeline_size: the number of ranks per pipeline.

    Example:
        >>> arrange([0, 1, 1], pipeline_size=2)
        Arrangement(mesh=RankMesh(pipelines=((0, 1),)), spare=(2,), missing=())
        >>> arrange([1], pipeline_size=2).missing
        (0,)
    """
    holders = [
        [rank for rank, held in enumerate(pipeline_ranks) if held == pipeline_rank]
        for pipeline_rank in range(pipeline_size)
    ]
    pipeline_count = min(map(len, holders))
    spare = sorted(rank for ranks in holders for rank in ranks[pipeline_count:])
    missing = tuple(p for p, ranks in enumerate(holders) if not ranks)
    if not pipeline_count:
        return Arrangement(None, (), missing)
    mesh = RankMesh(tuple(tuple(ranks[i] for ranks in holders) for i in range(pipeline_count)))
    return Arrangement(mesh, tuple(spare), missing)
