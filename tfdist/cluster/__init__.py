"""Who takes part in the job, and the connections on which its workers agree.

A description of the cluster (TF_CONFIG, a ClusterResolver) becomes a `Topology`; `meet` waits for
all its workers and returns a `Session`, over which they exchange small byte strings and learn at
once when one of them is lost; `connect` gives groups of them a `Mesh`, which carries tensors.
Nothing here imports TensorFlow.
"""

from tfdist.cluster.mesh.mesh import Mesh, connect
from tfdist.cluster.net.bind_address import check_own
from tfdist.cluster.net.dns import check_resolvable
from tfdist.cluster.rendezvous.meet import meet
from tfdist.cluster.session.session import Session
from tfdist.cluster.spec.resolver import ClusterResolver, from_resolver
from tfdist.cluster.spec.tf_config import from_environment, from_tf_config
from tfdist.cluster.spec.topology import Topology, Worker

__all__ = [
    "ClusterResolver",
    "Mesh",
    "Session",
    "Topology",
    "Worker",
    "check_own",
    "check_resolvable",
    "connect",
    "from_environment",
    "from_resolver",
    "from_tf_config",
    "meet",
]
