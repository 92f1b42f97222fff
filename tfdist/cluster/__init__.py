"""Who takes part in the job, and the connections on which its workers agree.

A description of the cluster (TF_CONFIG, a ClusterResolver) becomes a `Topology`; `meet` waits for
all its workers and returns a `Session`, over which they exchange small byte strings and learn at
once when one of them is lost; `connect` gives groups of them a `Mesh`, which carries tensors.
Nothing here imports TensorFlow.
"""

from tfdist.cluster.address import check_own
from tfdist.cluster.mesh import Mesh, connect
from tfdist.cluster.rendezvous import meet
from tfdist.cluster.resolution import check_resolvable
from tfdist.cluster.resolver import ClusterResolver, from_resolver
from tfdist.cluster.session import Session
from tfdist.cluster.tf_config import from_environment, from_tf_config
from tfdist.cluster.topology import Topology, Worker

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
