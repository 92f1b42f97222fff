"""Open MPI: the processes that its `mpirun` has started."""

from __future__ import annotations

from collections.abc import Mapping

from tfdist._src.cluster.resolvers.found import (
    AddressExchange,
    Found,
    number,
    numbered,
    rank_and_size,
)
from tfdist._src.cluster.resolvers.master import master
from tfdist._src.cluster.resolvers.pmix import share


def resolve(environ: Mapping[str, str]) -> Found | None:
    """The job of this process; None if Open MPI has not started it.

    Raises:
        ClusterError: the variables contradict each other.
    """
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    rank, size = rank_and_size(environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    exchange = AddressExchange(
        meeting=master(environ),
        share=None if master(environ) else share,
        one_host=number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE") == size,
    )
    return numbered("Open MPI", rank, size, exchange)
