"""Whether strangers can take part in a job, and what to say about it."""

from __future__ import annotations

import ipaddress

from tfdist._src.cluster.auth.hmac_challenge import VARIABLE
from tfdist._src.cluster.net.wait_messages import Announce
from tfdist._src.cluster.spec.host_port import split
from tfdist._src.cluster.spec.topology import Topology
from tfdist._src.options import Options
from tfdist.errors import ClusterError

_REMEDY = (
    f"Give all workers the same {VARIABLE} (`tfdist run` creates one; on Kubernetes, mount a "
    f"Secret as this variable; with Slurm, `export {VARIABLE}=$(openssl rand -hex 32)` before "
    f"srun), or TLS certificates"
)


def is_closed(topology: Topology, options: Options) -> bool:
    """Whether only processes that have proven to belong to the job can connect to it.

    Args:
        topology: the job's workers. On loopback only processes of this host reach them.
        options: `secret` and the TLS options are used.

    Example:
        >>> is_closed(Topology(), Options())
        True
    """
    return bool(options.secret) or options.tls or all(map(_is_loopback, _hosts(topology)))


def check_security(topology: Topology, options: Options, announce: Announce) -> None:
    """Warns of a job that is open to strangers, or refuses it.

    Args:
        topology: the job's workers.
        options: `security` says which; `secret` and the TLS options are used.
        announce: called with the warning, on rank 0.

    Raises:
        ClusterError: the job is open, and `TFDIST_SECURITY=required`.
    """
    if options.security == "none" or is_closed(topology, options):
        return
    if options.security == "required":
        raise ClusterError(
            f"{topology.me}: TFDIST_SECURITY=required, but the job has neither a secret nor TLS. "
            f"{_REMEDY}."
        )
    if topology.is_chief:
        announce(
            f"tfdist: anyone who can reach the workers' ports can take part in this job: it has "
            f"neither a secret nor TLS. {_REMEDY}; TFDIST_SECURITY=none silences this warning, "
            f"TFDIST_SECURITY=required makes it an error."
        )


def summary(topology: Topology, options: Options) -> str:
    """How the job's processes recognize one another, in a few words."""
    if options.tls:
        return "TLS certificates and a secret" if options.secret else "TLS certificates"
    if options.secret:
        return "a secret"
    if is_closed(topology, options):
        return "none; only processes of this host can connect"
    return f"none: anyone who can reach the workers' ports can take part. {_REMEDY}"


def _hosts(topology: Topology) -> set[str]:
    return {split(worker.address)[0] for worker in topology.workers if worker.address}


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
