"""Amazon SageMaker: the hosts of a training job. Each host runs one worker."""

import json
from collections.abc import Mapping

from tfdist._src.cluster import cluster_spec
from tfdist._src.cluster.cluster_spec import shown
from tfdist._src.cluster.resolvers.found import ResolvedJob
from tfdist.errors import ClusterError

_PORT = 2222
_AT = cluster_spec.Source("SM_HOSTS", "SM_CURRENT_HOST", "SM_CURRENT_HOST")


def resolve(environ: Mapping[str, str]) -> ResolvedJob | None:
    """Returns the training job of this container; None outside of SageMaker.

    Raises:
        ClusterError: the variables contradict each other.
    """
    if "SM_HOSTS" not in environ:
        return None
    text, me = environ["SM_HOSTS"], environ.get("SM_CURRENT_HOST", "")
    try:
        hosts = json.loads(text)
    except ValueError:
        hosts = None
    if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
        raise ClusterError(
            f"SM_HOSTS must be a JSON list of host names. Received: {shown(text)}. Leave it as "
            "SageMaker sets it, or set TF_CONFIG."
        )
    if me not in hosts:
        raise ClusterError(
            f"SM_CURRENT_HOST and SM_HOSTS contradict each other: this host is not in the list. "
            f"Received: SM_CURRENT_HOST={me!r}, SM_HOSTS={shown(text)}. Leave both as SageMaker "
            "sets them, or set TF_CONFIG."
        )
    if len(hosts) == 1:
        return ResolvedJob("SageMaker")
    addresses = [f"{host}:{_PORT}" for host in hosts]
    topology = cluster_spec.topology({"worker": addresses}, "worker", hosts.index(me), _AT)
    return ResolvedJob("SageMaker", topology)
