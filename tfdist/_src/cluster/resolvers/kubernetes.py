"""Kubernetes: the pods of an Indexed Job or a JobSet with a headless service.

`tfdist manifest` writes such a job. The name of each pod consists of the name of the job and the
index of the pod, and the service makes this name resolve to the pod's address. A pod cannot find
out how many pods its Indexed Job has. Therefore, TFDIST_WORKERS must contain the number of workers.
"""

import socket
from collections.abc import Mapping

from tfdist._src.cluster import cluster_spec
from tfdist._src.cluster.resolvers.found import ResolvedJob, number, rank_and_size
from tfdist._src.options import InternalVariable, Variable
from tfdist.errors import ClusterError

_RANK = "JOB_COMPLETION_INDEX"
_PORT = 2222
_AT = cluster_spec.Source("the job's pods", _RANK, _RANK)


def resolve(environ: Mapping[str, str]) -> ResolvedJob | None:
    """Returns the job of this pod; None if the pod does not belong to a distributed job.

    Raises:
        ClusterError: the variables contradict each other, or they contradict the pod's name.
    """
    if _RANK not in environ or Variable.WORKERS not in environ:
        return None
    if environ.get(InternalVariable.ELASTIC, "0") not in ("", "0"):
        # The job may have been scaled up since it started. TFDIST_WORKERS does not count the new
        # pods, which join the original ones.
        rank, size = number(environ, _RANK), number(environ, Variable.WORKERS)
        size = max(size, rank + 1)
    else:
        rank, size = rank_and_size(environ, _RANK, Variable.WORKERS)
    if size == 1:
        return ResolvedJob("Kubernetes")
    name = environ.get("HOSTNAME") or socket.gethostname()
    job, _, last = name.partition(".")[0].rpartition("-")
    service = environ.get(Variable.SERVICE, "")
    if not job or last != str(rank):
        raise ClusterError(
            f"The pod's host name does not end with its index. Received: {name!r}, {_RANK}={rank}. "
            "Use a job with completionMode: Indexed, and leave the pod's hostname alone."
        )
    if not service:
        raise ClusterError(
            "TFDIST_SERVICE is not set; the pods need it to find one another. Set it to the "
            "headless service that selects them, and use the same name as the pods' `subdomain`; "
            "`tfdist manifest` writes both."
        )
    addresses = [f"{job}-{index}.{service}:{_PORT}" for index in range(size)]
    return ResolvedJob(
        "Kubernetes", cluster_spec.topology({"worker": addresses}, "worker", rank, _AT)
    )
