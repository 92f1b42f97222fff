"""The arrangement of ranks in pipelines, at the start of a job and after workers have changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankGrid:
    """The mesh of a job: its ranks along the axes `data` and `pipeline`.

    Ranks that hold the same stages sum their gradients, so they are adjacent, and on the same host
    if they fit. The traffic between stages is lighter and crosses hosts.

    Attributes:
        pipelines: for each position on the data axis, the job's ranks along the pipeline axis.

    Example:
        >>> mesh = RankGrid.of_hosts([0, 0, 1, 1], pipeline=2)
        >>> mesh.pipelines
        ((0, 2), (1, 3))
        >>> mesh.data_group_of(3)
        (2, 3)
    """

    pipelines: tuple[tuple[int, ...], ...]

    @classmethod
    def of_hosts(cls, hosts: Sequence[int], pipeline: int) -> RankGrid:
        """Makes the mesh of a job.

        Args:
            hosts: for each rank of the job, the index of its host.
            pipeline: the number of ranks per pipeline.

        Raises:
            ValueError: the ranks do not divide evenly into pipelines.
        """
        if pipeline < 1 or len(hosts) % pipeline:
            raise ValueError(
                f"The number of workers must be a multiple of `pipeline_size`. Received: "
                f"pipeline_size={pipeline} for {len(hosts)} workers. Change the number of "
                "workers or `pipeline_size`."
            )
        data = len(hosts) // pipeline
        order = sorted(range(len(hosts)), key=lambda rank: (hosts[rank], rank))
        return cls(tuple(tuple(order[i::data]) for i in range(data)))

    @classmethod
    def of_one(cls, place: int, pipeline: int) -> RankGrid:
        """Makes the mesh of a group of one worker: its rank is 0, and -1 stands for missing ranks.

        Args:
            place: the pipeline rank.
            pipeline: the number of ranks per pipeline.
        """
        return cls((tuple(0 if p == place else -1 for p in range(pipeline)),))

    def __str__(self) -> str:
        return f"{self.data}x{self.pipeline}"

    @property
    def data(self) -> int:
        """The number of pipelines."""
        return len(self.pipelines)

    @property
    def pipeline(self) -> int:
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
        """For each pipeline rank, the job's ranks that have it and so hold the same stages."""
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

    mesh: RankGrid | None
    spare: tuple[int, ...]
    missing: tuple[int, ...]


def arrange(places: Sequence[int], pipeline: int) -> Arrangement:
    """Forms the largest possible number of pipelines; every worker keeps its stages.

    Args:
        places: for each rank of the job, its pipeline rank.
        pipeline: the number of ranks per pipeline.

    Example:
        >>> arrange([0, 1, 1], pipeline=2)
        Arrangement(mesh=RankGrid(pipelines=((0, 1),)), spare=(2,), missing=())
        >>> arrange([1], pipeline=2).missing
        (0,)
    """
    having = [[rank for rank, place in enumerate(places) if place == p] for p in range(pipeline)]
    data = min(map(len, having))
    spare = sorted(rank for ranks in having for rank in ranks[data:])
    missing = tuple(p for p, ranks in enumerate(having) if not ranks)
    if not data:
        return Arrangement(None, (), missing)
    mesh = RankGrid(tuple(tuple(ranks[i] for ranks in having) for i in range(data)))
    return Arrangement(mesh, tuple(spare), missing)
