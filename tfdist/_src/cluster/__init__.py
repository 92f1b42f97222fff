"""The workers of a job and the connections between them.

A `Topology` describes a job. It is read from the environment of the process, for example from
TF_CONFIG, from a ClusterResolver or from Slurm. `meet` waits for all workers of the job and returns
a `Session`. The session exchanges small byte strings between the workers and detects lost workers.
After a loss, a `Membership` lets the remaining workers and newcomers form a new group with a new
session. `connect` builds a `Mesh`, the connections over which the workers send tensors. This
package does not import TensorFlow.
"""

from tfdist._src.cluster.cluster_spec import Topology, Worker
from tfdist._src.cluster.membership.joining import Joiner, JoinRejected, meet_or_join
from tfdist._src.cluster.membership.membership import Membership
from tfdist._src.cluster.mesh.mesh import Mesh, connect
from tfdist._src.cluster.net.dns import check_resolvable
from tfdist._src.cluster.net.listener import check_own
from tfdist._src.cluster.observation import observe
from tfdist._src.cluster.rendezvous.rendezvous import meet
from tfdist._src.cluster.resolvers.exchange import complete
from tfdist._src.cluster.resolvers.found import ResolvedJob
from tfdist._src.cluster.resolvers.registry import find
from tfdist._src.cluster.session.session import Session
from tfdist._src.cluster.session.shared_state import Loss, Notice
from tfdist._src.cluster.tf_config import (
    ClusterResolver,
    from_environment,
    from_resolver,
    from_tf_config,
)

__all__ = [
    "ClusterResolver",
    "JoinRejected",
    "Joiner",
    "Loss",
    "Membership",
    "Mesh",
    "Notice",
    "ResolvedJob",
    "Session",
    "Topology",
    "Worker",
    "check_own",
    "check_resolvable",
    "complete",
    "connect",
    "find",
    "from_environment",
    "from_resolver",
    "from_tf_config",
    "meet",
    "meet_or_join",
    "observe",
]
