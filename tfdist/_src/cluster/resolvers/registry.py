"""Calls all resolvers in turn. If one engine can run inside another, the inner one is first."""

import dataclasses
import os
from collections.abc import Callable, Mapping

from tfdist._src.cluster.resolvers import kubernetes, mpi, sagemaker, slurm, torchrun
from tfdist._src.cluster.resolvers.found import ResolvedJob
from tfdist._src.cluster.tf_config import from_environment

Resolver = Callable[[Mapping[str, str]], ResolvedJob | None]

_IN_A_POD = "KUBERNETES_SERVICE_HOST"


def _tf_config(environ: Mapping[str, str]) -> ResolvedJob | None:
    return ResolvedJob("TF_CONFIG", from_environment(environ)) if environ.get("TF_CONFIG") else None


# Maps the name of each engine to its resolver, in the order in which they are called. TF_CONFIG is
# set by `tfdist run` and by Kubeflow's TFJob. mpirun can run inside a Slurm job, and all engines
# can run inside a Kubernetes pod.
RESOLVERS: dict[str, Resolver] = {
    "TF_CONFIG": _tf_config,
    "Open MPI": mpi.resolve_open_mpi,
    "MPICH": mpi.resolve_mpich,
    "Slurm": slurm.resolve,
    "torchrun": torchrun.resolve,
    "Kubernetes": kubernetes.resolve,
    "SageMaker": sagemaker.resolve,
}


def find(environ: Mapping[str, str] | None = None) -> ResolvedJob:
    """Returns the job of this process for all supported engines.

    Args:
        environ: the environment variables; `os.environ` by default.

    Returns:
        The result of the first resolver that finds a job. If no resolver finds one, the result
        describes a single process.

    Raises:
        ClusterError: the variables of an engine are invalid, or they contradict one another.

    Example:
        >>> find({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}).topology.size
        2
    """
    variables = os.environ if environ is None else environ
    for resolve in RESOLVERS.values():
        found = resolve(variables)
        if found is not None:
            return dataclasses.replace(found, late_names=_IN_A_POD in variables)
    return ResolvedJob()
