"""Connects every rank of a group with every other one, for a core that moves tensors."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from tfdist.cluster.mesh.colocation import host_key
from tfdist.cluster.mesh.full_mesh import CONTROL, DATA, FullMeshConnector
from tfdist.cluster.mesh.shared_memory import HostMemory, SegmentBytes
from tfdist.cluster.mesh.subgroups import Subgroup, check_members, group_of
from tfdist.cluster.net.descriptors import Owned, not_for_children
from tfdist.cluster.net.listener import listen_near, ports
from tfdist.cluster.net.tls import Tls
from tfdist.cluster.net.wait_messages import Announce, say
from tfdist.cluster.session.lockstep import Lockstep, Said
from tfdist.cluster.session.session import Session
from tfdist.errors import RendezvousError
from tfdist.options import Options

_ROUND_SECONDS = 1.0
_NAMED = 4


@dataclass(frozen=True)
class Mesh:
    """The descriptors by which one rank reaches the others of its group; `connect` makes it.

    Ranks are numbered within the group. The sockets are connected TCP streams that do not block, in
    the clear: where the options ask for TLS, it has served to prove who is at the other end, and
    whoever takes the sockets over begins anew, the lower rank as the server.

    Attributes:
        name: of the group, for messages.
        rank: of this process.
        size: ranks in the group.
        ranks: what messages call each rank.
        hosts: for each rank the number of its host.
        control: for each rank a socket; -1 for this process.
        data: for each rank of another host a socket; else -1.
        segment: memory shared by the ranks of this host; -1 for a rank alone on it.
        segment_bytes: its size; all of it is zero at first.
    """

    name: str
    rank: int
    size: int
    ranks: tuple[str, ...]
    hosts: tuple[int, ...]
    control: tuple[int, ...]
    data: tuple[int, ...]
    segment: int
    segment_bytes: int
    _owned: tuple[Owned, ...] = field(default=(), repr=False, compare=False)

    def hand_over(self) -> None:
        """Gives all descriptors to the caller: neither `close` nor a forked child closes them."""
        for owned in self._owned:
            owned.detach()

    def close(self) -> None:
        """Closes the descriptors, unless they were handed over; a second time does nothing."""
        for owned in self._owned:
            owned.close()


def connect(
    session: Session,
    name: str,
    members: Sequence[int],
    options: Options,
    segment_bytes: SegmentBytes,
    *,
    announce: Announce = say,
) -> Mesh | None:
    """Connects the ranks of a group; all ranks of the session call this together.

    Between any two ranks there is one connection for control, and one for data where they are on
    different hosts; the ranks of one host share memory. Each connection is proven by the job's
    secret, and strangers are refused with a line. The session splits into as many groups as there
    are different lists.

    Args:
        session: the connections to all ranks.
        name: of the group, for messages; the same on all ranks.
        members: the ranks of the session in this process's group, in the group's order; empty for
            a process in no group.
        options: `start_timeout` is how many seconds to wait; `secret`, `host` and those for TLS are
            used.
        segment_bytes: how many bytes so many ranks of one host share, at least one.
        announce: takes lines on strangers and on who is missing; stderr by default.

    Returns:
        What the core needs; None for a process in no group.

    Raises:
        TfdistError: the group is not connected; the same error on all ranks of the session, in
            all groups. The session can be used still, unless it was the session that failed.

    Example:
        >>> from tfdist.cluster import Topology, meet
        >>> from tfdist.options import Options
        >>> connect(meet(Topology(), Options()), "all", [0], Options(), lambda ranks: 1).size
        1
    """
    subject = f"mesh {name!r}"
    topology = session.topology
    steps = Lockstep(session, subject, options.start_timeout)
    with ExitStack() as listening, ExitStack() as unfinished:
        listeners: list[socket.socket] = []
        tls: list[Tls | None] = []

        def prepare() -> Said:
            check_members(members, topology)
            tls.append(Tls.load(options))
            if len(members) > 1:
                for sock in listen_near(topology.me.address, str(topology.me)):
                    listeners.append(not_for_children(listening.enter_context(sock)))
            return {
                "members": list(members),
                "identity": secrets.token_hex(8),
                "host": host_key(options),
                "ports": ports(listeners),
            }

        group = group_of(topology, steps.take("members", prepare), subject)
        sharing = HostMemory(group, segment_bytes, announce)
        unfinished.callback(sharing.close)
        sharing.share(steps)
        group = sharing.group
        weaving = None
        if group is not None and group.size > 1:
            weaving = FullMeshConnector(topology, group, listeners, options, tls[0], announce)
            unfinished.callback(weaving.close)
        _weave(steps, session, weaving, subject, options.start_timeout)
        sockets = weaving.finish() if weaving else {}
        unfinished.pop_all()
    if group is None:
        return None
    return _mesh(name, group, sockets, sharing)


def _weave(
    steps: Lockstep,
    session: Session,
    weaving: FullMeshConnector | None,
    subject: str,
    seconds: float,
) -> None:
    """Waits until all groups are connected.

    The ranks look at one another's progress round by round, so that none waits for one that has
    failed, and all hear the same of those that are missing.
    """

    def work() -> Said:
        if weaving is None:
            return {"missing": [], "late": False}
        if not started:
            weaving.start()
            started.append(True)
        weaving.wait(_ROUND_SECONDS)
        return weaving.status()

    started: list[bool] = []
    while True:
        said = steps.take("connections", work)
        if not any(one["missing"] for one in said):
            return
        if any(one["late"] for one in said):
            raise _late(session, said, subject, seconds)


def _late(session: Session, said: list[Said], subject: str, seconds: float) -> RendezvousError:
    """Names the connections that were not made; who dials knows the reason."""
    lacking: dict[tuple[int, int], str] = {}
    for dialled in (True, False):
        for rank, one in enumerate(said):
            for start, end, _, why in one["missing"]:
                if (start == rank) == dialled:
                    lacking.setdefault((start, end), why)
    workers = session.topology.workers
    lacks = [
        f"{workers[start]} does not reach {workers[end]} ({why})"
        for (start, end), why in sorted(lacking.items())
    ]
    more = f" and {len(lacks) - _NAMED} more" if len(lacks) > _NAMED else ""
    return RendezvousError(
        f"{subject} is not complete after {seconds:g} s: {'; '.join(lacks[:_NAMED])}{more}. Let "
        f"the workers reach one another through firewalls, at the ports of TF_CONFIG and others "
        f"where those are taken, or set TFDIST_START_TIMEOUT to wait longer."
    )


def _mesh(
    name: str,
    group: Subgroup,
    sockets: dict[tuple[int, str], socket.socket],
    sharing: HostMemory,
) -> Mesh:
    def numbers(kind: str) -> tuple[int, ...]:
        found = [sockets.get((rank, kind)) for rank in range(group.size)]
        return tuple(-1 if sock is None else sock.fileno() for sock in found)

    memory = sharing.descriptor
    return Mesh(
        name=name,
        rank=group.rank,
        size=group.size,
        ranks=group.names,
        hosts=group.hosts,
        control=numbers(CONTROL),
        data=numbers(DATA),
        segment=-1 if memory is None else memory.fileno(),
        segment_bytes=sharing.size,
        _owned=(*sockets.values(), *([memory] if memory else [])),
    )
