"""MPICH and its relatives: the processes that Hydra, their `mpiexec`, has started."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from tfdist._src.cluster.resolvers.found import (
    AddressExchange,
    Found,
    number,
    numbered,
    rank_and_size,
)
from tfdist._src.cluster.resolvers.master import master
from tfdist._src.cluster.resolvers.pmi import share


def resolve(environ: Mapping[str, str]) -> Found | None:
    """The job of this process; None if Hydra has not started it.

    Raises:
        ClusterError: the variables contradict each other.
    """
    # Slurm's plugins set the PMI variables as well, for steps that have no Hydra.
    if "PMI_SIZE" not in environ or "SLURM_MPI_TYPE" in environ:
        return None
    rank, size = rank_and_size(environ, "PMI_RANK", "PMI_SIZE")
    local = number(environ, "MPI_LOCALNRANKS") if "MPI_LOCALNRANKS" in environ else 0
    store = None
    if not master(environ) and size > 1:
        store = functools.partial(share, rank, number(environ, "PMI_FD"))
    exchange = AddressExchange(meeting=master(environ), share=store, one_host=local == size)
    return numbered("MPICH", rank, size, exchange)
