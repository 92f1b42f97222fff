"""The workers of a job and the connections between them.

What has started the job tells its `Topology` (TF_CONFIG, a ClusterResolver, Slurm, …); `meet` waits
for all its workers and returns a `Session`, which exchanges small byte strings and detects lost
workers; a `Membership` lets those that are left, and newcomers, form a new group with a session of
its own; `connect` builds the `Mesh` over which a group of workers sends tensors. Nothing here
imports TensorFlow.
"""

from tfdist.cluster.membership.joining import Declined, Joiner, meet_or_join
from tfdist.cluster.membership.membership import Membership
from tfdist.cluster.mesh.mesh import Mesh, connect
from tfdist.cluster.net.bind_address import check_own
from tfdist.cluster.net.dns import check_resolvable
from tfdist.cluster.observation.observers import observe
from tfdist.cluster.rendezvous.meet import meet
from tfdist.cluster.resolvers.exchange import complete
from tfdist.cluster.resolvers.found import Found
from tfdist.cluster.resolvers.registry import find
from tfdist.cluster.session.session import Session
from tfdist.cluster.session.shared_state import Notice
from tfdist.cluster.spec.resolver import ClusterResolver, from_resolver
from tfdist.cluster.spec.tf_config import from_environment, from_tf_config
from tfdist.cluster.spec.topology import Topology, Worker

__all__ = [
    "ClusterResolver",
    "Declined",
    "Found",
    "Joiner",
    "Membership",
    "Mesh",
    "Notice",
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
