"""Reads the cluster from TF_CONFIG or from a ClusterResolver."""

import json
import os
from collections.abc import Mapping
from typing import Any, Protocol

from tfdist._src.cluster import cluster_spec
from tfdist._src.cluster.cluster_spec import Topology, shown
from tfdist.errors import ClusterError

_TF_CONFIG = cluster_spec.Source(
    'TF_CONFIG["cluster"]', 'TF_CONFIG["task"]["type"]', 'TF_CONFIG["task"]["index"]'
)
_FORM = (
    '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'
)


def from_environment(environ: Mapping[str, str] | None = None) -> Topology:
    """Reads the cluster from the environment variable TF_CONFIG.

    Args:
        environ: the environment variables; `os.environ` by default.

    Returns:
        The topology. If TF_CONFIG is not set, the topology describes a single process.

    Raises:
        ClusterError: TF_CONFIG is invalid; see `from_tf_config`.

    Example:
        >>> from_environment({}).size
        1
    """
    return from_tf_config((os.environ if environ is None else environ).get("TF_CONFIG"))


def from_tf_config(text: str | None) -> Topology:
    """Reads the cluster from the text of TF_CONFIG.

    The chief is rank 0, and the workers follow in the order of their indices. If the cluster has no
    chief, worker 0 is rank 0. An evaluator is not part of the group. Keys other than `cluster` and
    `task` are ignored.

    Args:
        text: the JSON text. None, an empty text, `{}` and an empty cluster describe a single
            process.

    Returns:
        The topology.

    Raises:
        ClusterError: the text is invalid. The message names the place of the error and explains how
            to fix it.

    Example:
        >>> from_tf_config('{"cluster": {"worker": ["a:1", "b:1"]}, '
        ...                '"task": {"type": "worker", "index": 1}}').rank
        1
    """
    if text is None or not text.strip():
        return Topology()
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ClusterError(
            f"TF_CONFIG is not JSON ({error}). Received: {shown(text)}. Write it like {_FORM}."
        ) from None
    if not isinstance(config, dict):
        raise ClusterError(
            f"TF_CONFIG must be a JSON object. Received: {shown(text)}. Write it like {_FORM}."
        )
    if not config:
        return Topology()
    if "sparseCluster" in config:
        raise ClusterError(
            'TF_CONFIG has a "sparseCluster", in which each worker knows only itself, but all of '
            f"them train together. Received: {shown(config['sparseCluster'])}. Remove "
            '"enableDynamicWorker" from the TFJob.'
        )
    cluster = _part(config, "cluster", "TF_CONFIG")
    if not cluster:
        return Topology()
    task = _part(config, "task", "TF_CONFIG")
    for key in ("type", "index"):
        if key not in task:
            raise ClusterError(
                f'TF_CONFIG["task"] lacks "{key}". Received: {shown(task)}. Write it like {_FORM}.'
            )
    return cluster_spec.topology(cluster, task["type"], task["index"], _TF_CONFIG)


def _part(config: dict[str, object], key: str, where: str) -> dict[str, object]:
    if key not in config:
        raise ClusterError(
            f'{where} lacks "{key}". Received: {shown(config)}. Write it like {_FORM}.'
        )
    part = config[key]
    if not isinstance(part, dict):
        raise ClusterError(
            f'{where}["{key}"] must be a JSON object. Received: {shown(part)}. '
            f"Write it like {_FORM}."
        )
    return part


_RESOLVER = cluster_spec.Source(
    "cluster_resolver.cluster_spec()", "cluster_resolver.task_type", "cluster_resolver.task_id"
)


class ClusterSpec(Protocol):
    """The part of `tf.train.ClusterSpec` that tfdist uses."""

    def as_dict(self) -> Mapping[str, Any]:
        """Maps each job to its addresses: a list, or a dict that maps an index to an address."""


class ClusterResolver(Protocol):
    """The part of `tf.distribute.cluster_resolver.ClusterResolver` that tfdist uses."""

    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster's jobs and addresses."""

    @property
    def task_type(self) -> str | None:
        """This process's job."""

    @property
    def task_id(self) -> int | None:
        """This process's index within the job `task_type`."""


def from_resolver(resolver: ClusterResolver) -> Topology:
    """Reads the cluster from a resolver.

    Args:
        resolver: the resolver. Its `cluster_spec()`, `task_type` and `task_id` are read.

    Returns:
        The topology. If the cluster is empty, the topology describes a single process.

    Raises:
        ClusterError: the resolver does not know the task of this process, or describes an invalid
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
    return cluster_spec.topology(cluster, resolver.task_type, resolver.task_id, _RESOLVER)
