"""Reads the cluster from a tf.distribute ClusterResolver or a compatible object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from tfdist._src.cluster.spec import cluster_spec
from tfdist._src.cluster.spec.host_port import shown
from tfdist._src.cluster.spec.topology import Topology
from tfdist.errors import ClusterError

_AT = cluster_spec.Source(
    "cluster_resolver.cluster_spec()", "cluster_resolver.task_type", "cluster_resolver.task_id"
)


class ClusterSpec(Protocol):
    """The part of `tf.train.ClusterSpec` that is used."""

    def as_dict(self) -> Mapping[str, Any]:
        """Maps each job to its addresses, a list or a dict of index to address."""


class ClusterResolver(Protocol):
    """The part of `tf.distribute.cluster_resolver.ClusterResolver` that is used."""

    def cluster_spec(self) -> ClusterSpec:
        """The cluster's jobs and addresses."""

    @property
    def task_type(self) -> str | None:
        """This process's job."""

    @property
    def task_id(self) -> int | None:
        """Its index in that job."""


def from_resolver(resolver: ClusterResolver) -> Topology:
    """Reads the cluster from a resolver.

    Args:
        resolver: its `cluster_spec()`, `task_type` and `task_id` are used.

    Returns:
        The topology; that of a single process if the cluster is empty.

    Raises:
        ClusterError: the resolver does not know this process's task, or describes an invalid
            cluster.

    Example:
        >>> from_resolver(tf.distribute.cluster_resolver.SlurmClusterResolver())  # doctest: +SKIP
    """
    spec = resolver.cluster_spec()
    cluster = spec.as_dict() if spec else {}
    if not cluster:
        return Topology()
    for name, value in (("task_type", resolver.task_type), ("task_id", resolver.task_id)):
        if value is None:
            kind = type(resolver).__name__
            raise ClusterError(
                f"{kind} describes a cluster but not this process's task: "
                f"its {name} is None. Received: {shown(dict(cluster))}. Pass task_type= and "
                f"task_id= to it; on a resolver that does not accept them "
                f"(KubernetesClusterResolver), set resolver.task_type = 'worker' and "
                f"resolver.task_id = 0."
            )
    return cluster_spec.topology(cluster, resolver.task_type, resolver.task_id, _AT)
