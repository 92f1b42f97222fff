"""Functions that tell a script its place in the job: `tfdist.rank()`, `size()`, `is_chief()`."""

from tfdist._src.cluster.cluster_spec import Topology
from tfdist._src.cluster.resolvers.registry import find

_joined: Topology | None = None
_is_admitted = True


def note_joined(topology: Topology, *, is_admitted: bool = True) -> None:
    """Records the job of this process.

    Args:
        topology: the workers of the job, and the rank of this process.
        is_admitted: whether this process has joined the job. If False, the process still waits to
            be admitted to the job, which is already running.
    """
    global _joined, _is_admitted
    _joined, _is_admitted = topology, is_admitted


def rank() -> int:
    """Returns the rank of this worker, starting at 0; the chief is rank 0.

    Until a strategy is created, the rank is read from the environment: from `TF_CONFIG`, or from
    the variables of Slurm, mpirun or another engine. Each worker has one rank, even if the worker
    has several GPUs.

    Raises:
        ClusterError: the environment variables that describe the job are invalid.

    Example:
        >>> import tfdist
        >>> tfdist.rank()  # without a cluster
        0
    """
    return topology().rank


def size() -> int:
    """Returns the number of workers in the job; 1 without a cluster.

    Until a strategy is created, this number is read from the environment: from `TF_CONFIG`, or from
    the variables of Slurm, mpirun or another engine. This function does not count devices. The
    number of replicas on all devices of all workers is `strategy.num_replicas_in_sync`.

    Raises:
        ClusterError: the environment variables that describe the job are invalid.

    Example:
        >>> import tfdist
        >>> tfdist.size()  # without a cluster
        1
    """
    return topology().size


def is_chief() -> bool:
    """Whether this worker is the chief, which writes files and prints on behalf of the job.

    The chief is rank 0. The result is False if this process waits to be admitted to a running job.

    Raises:
        ClusterError: the environment variables that describe the job are invalid.

    Example:
        >>> import tfdist
        >>> if tfdist.is_chief():
        ...     print("one line for the whole job")
        one line for the whole job
    """
    return _is_admitted and topology().is_chief


def topology() -> Topology:
    """Returns the workers of the job and the rank of this process.

    Until this process has joined a job, the topology is read from the environment.

    Raises:
        ClusterError: the environment variables that describe the job are invalid.
    """
    return find().topology if _joined is None else _joined
