"""Lets observers ask rank 0 how the job goes, at the address at which the workers have met."""

from __future__ import annotations

import selectors

from tfdist._src.cluster.auth.identity import OBSERVE
from tfdist._src.cluster.auth.trust import is_closed
from tfdist._src.cluster.net.wait_messages import Announce, say
from tfdist._src.cluster.observation.answering import MOST, Answering
from tfdist._src.cluster.rendezvous.shared_listener import Wake, shared_listener_of
from tfdist._src.cluster.session.session import Session
from tfdist._src.options import Options


def observe(session: Session, options: Options, announce: Announce = say) -> None:
    """Has rank 0 answer observers at its address from now on, while the workers do not need it.

    Calling it again has no effect, nor does it on other ranks. Jobs without a secret that others
    than this host's processes can reach are not observed: strangers would get answers.

    Args:
        session: the session.
        options: `secret` and the TLS options authenticate observers as they do workers.
        announce: called with lines about rejected connections; writes to stderr by default.

    Example:
        >>> from tfdist._src.cluster import Topology, meet
        >>> observe(meet(Topology(), Options()), Options())  # alone, there is nobody to ask
    """
    if session.rank != 0 or session.size == 1 or not is_closed(session.topology, options):
        return
    what = "`tfdist doctor --job` cannot ask this job"
    listener = shared_listener_of(session, options, what, announce)
    if listener.serves(OBSERVE):
        return

    def answering(selector: selectors.BaseSelector, wake: Wake) -> Answering:
        return Answering(selector, session, wake)

    listener.serve(OBSERVE, answering, MOST)
    session.address.let(listener)
