"""The places of the ranks: which stages of the model each holds, and who holds the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankGrid:
    """The axes `data` and `pipeline` of a job.

    Ranks that hold the same stages, and sum their gradients, are next to each other, within a host
    where they fit; what goes from stage to stage is the lighter traffic and crosses hosts.

    Attributes:
        pipelines: for each place on the data axis, the job's ranks along the pipeline.

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
        """The mesh of a job.

        Args:
            hosts: for each rank of the job the number of its host.
            pipeline: the number of ranks of a pipeline.

        Raises:
            ValueError: the ranks do not divide into pipelines.
        """
        if pipeline < 1 or len(hosts) % pipeline:
            raise ValueError(
                f"The number of workers must be a multiple of `pipeline_size`. Received: "
                f"pipeline_size={pipeline} for {len(hosts)} workers. Start another number of "
                "workers, or choose another `pipeline_size`."
            )
        data = len(hosts) // pipeline
        order = sorted(range(len(hosts)), key=lambda rank: (hosts[rank], rank))
        return cls(tuple(tuple(order[i::data]) for i in range(data)))

    def __str__(self) -> str:
        return f"{self.data}x{self.pipeline}"

    @property
    def data(self) -> int:
        """The number of pipelines."""
        return len(self.pipelines)

    @property
    def pipeline(self) -> int:
        """The number of ranks of each."""
        return len(self.pipelines[0])

    def pipeline_of(self, rank: int) -> tuple[int, ...]:
        """The job's ranks of the pipeline that a rank belongs to."""
        return next(ranks for ranks in self.pipelines if rank in ranks)

    def place_of(self, rank: int) -> int:
        """A rank's place in its pipeline."""
        return self.pipeline_of(rank).index(rank)

    @property
    def data_groups(self) -> tuple[tuple[int, ...], ...]:
        """For each place in a pipeline, the job's ranks there: they hold the same stages."""
        return tuple(zip(*self.pipelines, strict=True))

    def data_group_of(self, rank: int) -> tuple[int, ...]:
        """The job's ranks that hold the same stages as a rank."""
        return self.data_groups[self.place_of(rank)]
