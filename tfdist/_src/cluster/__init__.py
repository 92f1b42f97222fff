"""The workers of a job and the connections between them.

A `Topology` describes the job, as read from its environment (TF_CONFIG, a ClusterResolver, Slurm,
…). `meet` waits for all its workers and returns a `Session`, which exchanges small byte strings and
detects lost workers. A `Membership` lets the remaining workers and newcomers form a new group with
its own session. `connect` builds the `Mesh` over which a group of workers sends tensors. This
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
