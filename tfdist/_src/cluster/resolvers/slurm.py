"""Slurm: the tasks of a step that `srun` has started.

Rank 0 runs on the first host of the step's list, whatever the distribution; it listens at a port
that follows from the numbers of job and step, and the others learn the addresses there.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping

from tfdist._src.cluster.resolvers.found import (
    AddressExchange,
    Found,
    number,
    numbered,
    rank_and_size,
)
from tfdist._src.cluster.resolvers.host_list import expand
from tfdist._src.cluster.resolvers.master import master
from tfdist.errors import ClusterError

_RANK, _SIZE = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"
_FIRST_PORT, _PORTS = 12000, 20000
"""Below the ports that systems give to outgoing connections."""

_INNER = ("OMPI_COMM_WORLD_SIZE", "HYDI_CONTROL_FD", "TORCHELASTIC_RUN_ID")
"""Set by launchers that srun has started, whose processes are not srun's tasks."""


def resolve(environ: Mapping[str, str]) -> Found | None:
    """The step that this process is a task of; None outside of a step.

    Raises:
        ClusterError: the variables contradict each other, or the step is heterogeneous.
    """
    if not environ.get("SLURM_STEP_ID", "").isdecimal() or any(map(environ.get, _INNER)):
        return None
    if environ.get("SLURM_HET_SIZE", "1") != "1":
        raise ClusterError(
            "A heterogeneous job of Slurm has no list of all its hosts. Received: SLURM_HET_SIZE="
            f"{environ['SLURM_HET_SIZE']}. Submit a job of one component, or set TF_CONFIG."
        )
    rank, size = rank_and_size(environ, _RANK, _SIZE)
    for mine, theirs, value in (("RANK", _RANK, rank), ("WORLD_SIZE", _SIZE, size)):
        if environ.get(mine, str(value)) != str(value):
            raise ClusterError(
                f"{mine} and {theirs} contradict each other. Received: {mine}={environ[mine]}, "
                f"{theirs}={value}. Unset {mine}: srun tells each task its place; or start as many "
                "tasks."
            )
    if size == 1:
        return Found("Slurm")
    hosts = expand(environ.get("SLURM_STEP_NODELIST", ""), "SLURM_STEP_NODELIST")
    job, step = number(environ, "SLURM_JOB_ID"), number(environ, "SLURM_STEP_ID")
    exchange = AddressExchange(
        meeting=master(environ, hosts[0], _FIRST_PORT + (31 * job + step) % _PORTS),
        seals=shutil.which("munge") is not None,
        one_host=len(hosts) == 1,
    )
    return numbered("Slurm", rank, size, exchange)
