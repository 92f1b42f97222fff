"""The resolvers in the order in which they are called, the innermost engine first."""

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


# Name -> resolver; the first result counts. `tfdist run` and Kubeflow's TFJob set TF_CONFIG.
# mpirun may run inside a Slurm job, and any engine in a pod.
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
    """Returns this process's job, regardless of the engine that started it.

    Args:
        environ: variables to read; this process's environment by default.

    Returns:
        The result of the first resolver that finds a job; otherwise a single process.

    Raises:
        ClusterError: the variables of an engine are invalid, or contradict one another.

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
