"""Arranges ranks in pipelines, at the start of a job and after workers have joined or left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankMesh:
    """The ranks of a job, arranged in a mesh with the axes `data` and `pipeline`.

    All ranks with the same position on the pipeline axis hold the same stages and form a data
    group. A data group sums the gradients of its stages, which takes more communication than the
    messages between stages. So the ranks of a data group have consecutive positions in the order
    of hosts, and are on the same host if possible. The ranks of a pipeline may be on different
    hosts.

    Attributes:
        pipelines: for each pipeline (position on the data axis), the job's ranks in the order of
            the pipeline axis.

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
        """Makes the mesh of a job at its start.

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
        """Makes the mesh of a group that consists of a single worker, of rank 0.

        In the mesh, -1 stands for the other ranks of the worker's pipeline, which are missing.

        Args:
            pipeline_rank: the worker's position in its pipeline.
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
        """Returns the job's ranks that are in the same pipeline as a given rank."""
        return next(ranks for ranks in self.pipelines if rank in ranks)

    def pipeline_rank_of(self, rank: int) -> int:
        """Returns the pipeline rank of a rank of the job: the rank's position in its pipeline."""
        return self.pipeline_of(rank).index(rank)

    @property
    def data_groups(self) -> tuple[tuple[int, ...], ...]:
        """The data groups: for each pipeline rank, the ranks of the job that hold its stages."""
        return tuple(zip(*self.pipelines, strict=True))

    def data_group_of(self, rank: int) -> tuple[int, ...]:
        """Returns the job's ranks that hold the same stages as a given rank, including the rank."""
        return self.data_groups[self.pipeline_rank_of(rank)]


@dataclass(frozen=True)
class Arrangement:
    """The pipelines of a group after workers have joined or left.

    Attributes:
        mesh: the mesh of all complete pipelines; None if the workers cannot form a complete
            pipeline.
        spare: the ranks that belong to no pipeline of `mesh`, since there are not enough other
            ranks to complete another pipeline. This tuple is empty if `mesh` is None.
        missing: the pipeline ranks that no worker has.
    """

    mesh: RankMesh | None
    spare: tuple[int, ...]
    missing: tuple[int, ...]


def arrange(pipeline_ranks: Sequence[int], pipeline_size: int) -> Arrangement:
    """Forms the largest possible number of pipelines from workers that keep their stages.

    Args:
        pipeline_ranks: for each rank of the job, its pipeline rank, which determines its stages.
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
