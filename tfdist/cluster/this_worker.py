"""This process's place in its job, for scripts: `tfdist.rank()`, `size()` and `is_chief()`."""

from __future__ import annotations

from tfdist.cluster.spec.tf_config import from_environment
from tfdist.cluster.spec.topology import Topology

_joined: Topology | None = None


def note_joined(topology: Topology) -> None:
    """Notes the job that this process has become a member of."""
    global _joined
    _joined = topology


def rank() -> int:
    """This worker's number in its job, from 0; the chief is 0.

    Before a strategy is made it is read from `TF_CONFIG`. Devices do not count: a worker with four
    GPUs is one worker.

    Raises:
        ClusterError: `TF_CONFIG` is wrong.

    Example:
        >>> import tfdist
        >>> tfdist.rank()  # without a cluster
        0
    """
    return _topology().rank


def size() -> int:
    """The number of workers in the job, 1 for a process alone.

    Before a strategy is made it is read from `TF_CONFIG`. What is shared by all devices of all
    workers is `strategy.num_replicas_in_sync`.

    Raises:
        ClusterError: `TF_CONFIG` is wrong.

    Example:
        >>> import tfdist
        >>> tfdist.size()  # without a cluster
        1
    """
    return _topology().size


def is_chief() -> bool:
    """Whether this is the worker that writes and prints what one worker has to, that of rank 0.

    Raises:
        ClusterError: `TF_CONFIG` is wrong.

    Example:
        >>> import tfdist
        >>> if tfdist.is_chief():
        ...     print("one line for the whole job")
        one line for the whole job
    """
    return _topology().is_chief


def _topology() -> Topology:
    return from_environment() if _joined is None else _joined
