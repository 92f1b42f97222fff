"""Which pipelines a group of workers can form, each of which holds certain stages already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tfdist._src.pipeline.placement.rank_grid import RankGrid


@dataclass(frozen=True)
class Arrangement:
    """The pipelines of a group whose workers have changed.

    Attributes:
        mesh: the pipelines; None if there is not a single one.
        spare: the ranks that are in none, since others of their pipeline are lost.
        missing: the pipeline ranks that nobody has.
    """

    mesh: RankGrid | None
    spare: tuple[int, ...]
    missing: tuple[int, ...]


def arrange(places: Sequence[int], pipeline: int) -> Arrangement:
    """Forms as many pipelines as there are workers for; nobody changes its stages.

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
