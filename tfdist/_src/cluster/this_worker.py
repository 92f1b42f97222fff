"""This process's place in its job, for scripts: `tfdist.rank()`, `size()` and `is_chief()`."""

from tfdist._src.cluster.cluster_spec import Topology
from tfdist._src.cluster.resolvers.registry import find

_joined: Topology | None = None
_is_admitted = True


def note_joined(topology: Topology, *, is_admitted: bool = True) -> None:
    """Records the job that this process has joined, or waits to join if not `is_admitted`."""
    global _joined, _is_admitted
    _joined, _is_admitted = topology, is_admitted


def rank() -> int:
    """The rank of this worker, starting at 0; the chief is rank 0.

    Until a strategy is created, it is read from the environment: from `TF_CONFIG`, or from the
    variables of Slurm, mpirun and others. Ranks number workers, not devices: a worker with four
    GPUs has one rank.

    Raises:
        ClusterError: the environment's description of the job is invalid.

    Example:
        >>> import tfdist
        >>> tfdist.rank()  # without a cluster
        0
    """
    return topology().rank


def size() -> int:
    """The number of workers in the job; 1 without a cluster.

    Until a strategy is created, it is read from the environment: from `TF_CONFIG`, or from the
    variables of Slurm, mpirun and others. The number of replicas on all devices of all workers is
    `strategy.num_replicas_in_sync`.

    Raises:
        ClusterError: the environment's description of the job is invalid.

    Example:
        >>> import tfdist
        >>> tfdist.size()  # without a cluster
        1
    """
    return topology().size


def is_chief() -> bool:
    """Whether this is rank 0, the worker that writes files and prints on behalf of the job.

    False for a process that waits to be admitted to a running job.

    Raises:
        ClusterError: the environment's description of the job is invalid.

    Example:
        >>> import tfdist
        >>> if tfdist.is_chief():
        ...     print("one line for the whole job")
        one line for the whole job
    """
    return _is_admitted and topology().is_chief


def topology() -> Topology:
    """Returns the job that this process has joined or, until then, the one in its environment.

    Raises:
        ClusterError: the environment's description of the job is invalid.
    """
    return find().topology if _joined is None else _joined
