"""Gathers all workers at rank 0's address before TensorFlow starts a server there."""

from __future__ import annotations

import socket

from tfdist.cluster.net.bind_address import claim, explain
from tfdist.cluster.net.dns import check_resolvable
from tfdist.cluster.net.tls import Tls
from tfdist.cluster.net.wait_messages import Announce, say
from tfdist.cluster.rendezvous.client import RendezvousClient
from tfdist.cluster.rendezvous.server import RendezvousServer
from tfdist.cluster.session.session import Session
from tfdist.cluster.spec.topology import Topology
from tfdist.options import Options

_BACKLOG = 512


def meet(topology: Topology, options: Options, *, announce: Announce = say) -> Session:
    """Waits until every worker of the group has come, and connects them.

    Each worker first checks its own address. Then rank 0 listens at its address and the others
    dial it. Where this returns, all are there and have proven to one another that they hold the
    job's secret, they hold the same cluster and run the same version of tfdist, and every worker's
    address is free for TensorFlow's server. The connections to rank 0 stay open for the life of the
    session; they use TLS where the options say so.

    Args:
        topology: the group and this process's place in it.
        options: `start_timeout` is how many seconds to wait, `secret` is what all have to know,
            `tls_certificate`, `tls_key` and `tls_ca` are by what they trust one another; the others
            are for the session.
        announce: takes a line on who is missing, now and then; stderr by default.

    Returns:
        The session; a trivial one without connections for a process alone.

    Raises:
        ClusterError: an address cannot be used, or the workers do not fit together, or rank 0
            holds another secret.
        TlsError: this worker's certificate is of no use, or rank 0 and this worker do not trust one
            another, or only one of the two uses TLS.
        RendezvousError: not all came in time.

    Example:
        >>> meet(Topology(), Options()).exchange("greeting", b"hello")
        [b'hello']
    """
    if topology.size == 1:
        return Session(topology, {}, options)
    tls = Tls.load(options)
    claimed = claim(topology.me.address, name=str(topology.me))
    try:
        if topology.rank == 0:
            _listen(topology, claimed)
            sockets = RendezvousServer(topology, claimed, options, tls, announce).run()
        else:
            check_resolvable(topology.chief.address, name=str(topology.chief))
            sockets = {0: RendezvousClient(topology, options, tls, announce).run()}
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
