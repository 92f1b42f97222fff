"""Performs the rendezvous at rank 0's address, before TensorFlow starts a server there."""

from __future__ import annotations

import socket
from collections.abc import Callable

from tfdist._src.cluster.auth.trust import check_security
from tfdist._src.cluster.net.bind_address import claim, explain
from tfdist._src.cluster.net.descriptors import allow_descriptors
from tfdist._src.cluster.net.dns import check_resolvable
from tfdist._src.cluster.net.tls import Tls
from tfdist._src.cluster.net.wait_messages import Announce, say
from tfdist._src.cluster.rendezvous.client import RendezvousClient
from tfdist._src.cluster.rendezvous.server import RendezvousServer
from tfdist._src.cluster.session.session import Session
from tfdist._src.cluster.spec.topology import Topology
from tfdist._src.options import Options

_BACKLOG = 512


def meet(
    topology: Topology,
    options: Options,
    *,
    announce: Announce = say,
    check: Callable[[], object] = lambda: None,
) -> Session:
    """Waits for every worker of the group, and connects them.

    Each worker first checks its address. Rank 0 then listens at its address, and the others dial
    it. When this returns, all workers have arrived and authenticated with the job's secret, they
    have the same cluster and the same version of tfdist, and every worker's address is free for
    TensorFlow's server. The connections to rank 0 stay open for the lifetime of the session, and
    use TLS if the options enable it.

    Args:
        topology: the group and this process's rank.
        options: `start_timeout` is the number of seconds to wait, `secret` authenticates the
            workers, and `tls_certificate`, `tls_key` and `tls_ca` enable TLS; the session uses the
            other options.
        announce: called now and then with a line about missing workers; writes to stderr by
            default.
        check: called several times a second; what it raises ends the wait.

    Returns:
        The session; without connections for a single process.

    Raises:
        ClusterError: the job must be secured and is not, an address cannot be used, the workers
            are incompatible, or rank 0 has a different secret.
        TlsError: this worker's certificate is unusable, rank 0 and this worker do not trust each
            other, or only one of them uses TLS.
        RendezvousError: some worker did not arrive in time.

    Example:
        >>> meet(Topology(), Options()).exchange("greeting", b"hello")
        [b'hello']
    """
    if topology.size == 1:
        return Session(topology, {}, options)
    check_security(topology, options, announce)
    tls = Tls.load(options)
    # Workers that have yet to tell one another their addresses only dial rank 0.
    known = bool(topology.me.address)
    claimed = claim(topology.me.address, name=str(topology.me)) if known else []
    try:
        if topology.rank == 0:
            _listen(topology, claimed)
            allow_descriptors(topology.size)
            sockets = RendezvousServer(topology, claimed, options, tls, announce, check).run()
        else:
            check_resolvable(topology.chief.address, name=str(topology.chief))
            sockets = {0: RendezvousClient(topology, options, tls, announce, check).run()}
    finally:
        for sock in claimed:
            sock.close()
    return Session(topology, sockets, options)


def _listen(topology: Topology, claimed: list[socket.socket]) -> None:
    for sock in claimed:
        try:
            sock.listen(_BACKLOG)
        except OSError as error:
            raise explain(error, topology.me.address, str(topology.me)) from None
