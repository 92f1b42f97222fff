"""Builds the full mesh of connections over which the native core sends tensors."""

import itertools
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from tfdist._src.cluster.cluster_spec import Topology
from tfdist._src.cluster.mesh import subgroups
from tfdist._src.cluster.mesh.full_mesh import CONTROL, DATA, FullMeshConnector
from tfdist._src.cluster.mesh.shared_memory import HostMemory, SegmentBytes
from tfdist._src.cluster.net.listener import listen_near, ports
from tfdist._src.cluster.net.sockets import (
    Descriptor,
    HasDescriptor,
    allow_descriptors,
    close_on_fork,
)
from tfdist._src.cluster.net.tls import Tls
from tfdist._src.cluster.net.wait_messages import Announce
from tfdist._src.cluster.session.session import Lockstep, Report, Session
from tfdist._src.log import logger
from tfdist._src.options import Options
from tfdist.errors import RendezvousError

_ROUND_SECONDS_PER_RANK = 1 / 64
_ROUND_GROWTH = 4.0
_MAX_ROUND_SECONDS = 16.0
_NAMED = 4


@dataclass(frozen=True)
class Mesh:
    """The file descriptors that connect a rank to the other ranks of its group.

    A mesh is created by `connect`. All ranks in a mesh are numbered within the group. The sockets
    are non-blocking TCP connections without encryption. If the job uses TLS, `connect` uses TLS
    only to authenticate the peers. The code that takes over the sockets must then perform a new TLS
    handshake, in which the lower rank is the server.

    Attributes:
        name: the name of the group in messages.
        rank: the rank of this process.
        size: the number of ranks in the group.
        ranks: the name of each rank in messages.
        hosts: the number of the host on which each rank runs.
        control: the control socket for each rank; -1 for this process.
        data: the data socket for each rank on another host; -1 for the ranks on this host.
        segment: the descriptor of the shared memory of the ranks on this host. The memory is
            initially filled with zeros. -1 if this rank is the only one on its host.
        segment_bytes: the size of the shared memory in bytes.
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
    _sockets: tuple[HasDescriptor, ...] = field(default=(), repr=False, compare=False)
    _memory: HasDescriptor | None = field(default=None, repr=False, compare=False)

    def hand_over_segment(self) -> None:
        """Makes the caller the owner of the descriptor `segment` (see `hand_over`)."""
        if self._memory:
            self._memory.detach()

    def hand_over(self) -> None:
        """Makes the caller the owner of all descriptors, which it must close.

        From now on, `close` does not close these descriptors, and neither do forked children.
        """
        self.hand_over_segment()
        for owner in self._sockets:
            owner.detach()

    def close(self) -> None:
        """Closes the descriptors that have not been handed over; may be called repeatedly."""
        for owner in (*self._sockets, *([self._memory] if self._memory else [])):
            owner.close()


def connect(
    session: Session,
    name: str,
    members: Sequence[int],
    options: Options,
    segment_bytes: SegmentBytes,
    *,
    announce: Announce = logger.warning,
) -> Mesh | None:
    """Connects the ranks of a group; all ranks of the session must call this together.

    Each pair of ranks gets a control connection. Two ranks on different hosts also get a data
    connection, and the ranks on the same host share memory. The job's secret authenticates each
    connection; other connections are rejected and reported. One call can connect several groups:
    the ranks that pass the same `members` form a group.

    Args:
        session: the session of all ranks.
        name: the name of the group in messages. It must be the same on all ranks.
        members: the ranks of the session that form this process's group, in the order of their new
            ranks. Empty if this process does not belong to a group.
        options: the job's options. `start_timeout` is the number of seconds to wait. `secret`,
            `host` and the TLS options are also used.
        segment_bytes: called with the number of ranks on this host; returns the size of their
            shared memory in bytes, at least 1.
        announce: called with each message about a missing worker or a rejected connection; prints
            to stderr by default.

    Returns:
        The mesh; None if this process does not belong to a group.

    Raises:
        TfdistError: a group could not be connected. All ranks of the session raise the same error,
            even the ranks of other groups. The session remains usable unless it has failed itself.

    Example:
        >>> from tfdist._src.cluster import Topology, meet
        >>> from tfdist._src.options import Options
        >>> connect(meet(Topology(), Options()), "all", [0], Options(), lambda ranks: 1).size
        1
    """
    subject = f"mesh {name!r}"
    topology = session.topology
    steps = Lockstep(session, subject, options.start_timeout)
    with session.address.free(), ExitStack() as listening, ExitStack() as unfinished:
        listeners: list[socket.socket] = []
        tls: list[Tls | None] = []

        def prepare() -> Report:
            subgroups.check_members(members, topology)
            allow_descriptors(2 * len(members))
            tls.append(Tls.load(options))
            if len(members) > 1:
                for sock in listen_near(topology.me.address, str(topology.me)):
                    listeners.append(close_on_fork(listening.enter_context(sock)))
            return {
                "members": subgroups.to_runs(members),
                "identity": secrets.token_hex(8),
                "host": subgroups.host_key(options),
                "ports": ports(listeners, topology.me.address) if listeners else None,
            }

        plan = subgroups.SessionPlan(topology, subject)
        group = subgroups.group_of(topology, steps.run("members", prepare, plan.split))
        memory = HostMemory(group, segment_bytes, announce)
        unfinished.callback(memory.close)
        memory.share(steps, plan)
        group = memory.group
        connectors: list[FullMeshConnector] = []

        def start() -> FullMeshConnector | None:
            if group is not None and group.size > 1 and not connectors:
                made = FullMeshConnector(topology, group, listeners, options, tls[0], announce)
                unfinished.callback(made.close)
                connectors.append(made)
                made.start()
            return connectors[0] if connectors else None

        _wait_connected(session, steps, start, subject, options.start_timeout)
        sockets = connectors[0].finish() if connectors else {}
        unfinished.pop_all()
    if group is None:
        return None
    return _mesh(name, group, sockets, memory)


def _wait_connected(
    session: Session,
    steps: Lockstep,
    start: Callable[[], FullMeshConnector | None],
    subject: str,
    seconds: float,
) -> None:
    """Waits until all groups are connected.

    In each round, all ranks report their progress to rank 0. If a rank has failed, all ranks learn
    of it at the end of the round and raise the same error. If a worker is lost, the round ends
    immediately.
    """

    def work() -> Report:
        connector = start()
        if connector is None:
            return {"missing": 0, "some": [], "late": False}
        connector.wait(next(seconds_of_rounds), session.check)
        return connector.status(_NAMED)

    def decide(reports: list[Report]) -> list[Report]:
        complete = not any(report["missing"] for report in reports)
        if not complete and any(report["late"] for report in reports):
            raise _timeout_error(session.topology, reports, subject, seconds)
        return [{"complete": complete}] * len(reports)

    # A rank reports immediately when it has all of its connections. The other ranks report at the
    # end of the round, and each round is longer than the previous one.
    first = max(1.0, session.size * _ROUND_SECONDS_PER_RANK)
    longest = min(_MAX_ROUND_SECONDS, seconds / 2)
    seconds_of_rounds = (min(first * _ROUND_GROWTH**i, longest) for i in itertools.count())
    while not steps.run("connections", work, decide)["complete"]:
        pass


def _timeout_error(
    topology: Topology, reports: list[Report], subject: str, seconds: float
) -> RendezvousError:
    """Returns an error that names some of the missing connections and the reasons.

    If both ends have reported a connection, the error contains the reason from the dialer.
    """
    reasons: dict[tuple[int, int], str] = {}
    for by_dialer in (True, False):
        for rank, report in enumerate(reports):
            for start, end, reason in report["some"]:
                if (start == rank) == by_dialer:
                    reasons.setdefault((start, end), reason)
    workers = topology.workers
    missing = [
        f"{workers[start]} cannot reach {workers[end]} ({reason})"
        for (start, end), reason in sorted(reasons.items())
    ]
    # Both ends of a connection count it as missing.
    more = max(len(missing), sum(report["missing"] for report in reports) // 2) - _NAMED
    others = f" and {more} more" if more > 0 else ""
    return RendezvousError(
        f"{subject} is incomplete after {seconds:g} s: {'; '.join(missing[:_NAMED])}{others}. "
        f"Allow connections between the workers in all firewalls, to the ports of TF_CONFIG and, "
        f"where those are taken, to other ports, or increase TFDIST_START_TIMEOUT."
    )


def _mesh(
    name: str,
    group: subgroups.Subgroup,
    sockets: dict[tuple[int, str], socket.socket],
    memory: HostMemory,
) -> Mesh:
    def descriptors(kind: str) -> tuple[int, ...]:
        by_rank = [sockets.get((rank, kind)) for rank in range(group.size)]
        return tuple(-1 if sock is None else sock.fileno() for sock in by_rank)

    segment = memory.descriptor
    return Mesh(
        name=name,
        rank=group.rank,
        size=group.size,
        ranks=group.names,
        hosts=group.hosts,
        control=descriptors(CONTROL),
        data=descriptors(DATA),
        segment=-1 if segment is None else segment.fileno(),
        segment_bytes=memory.size,
        _sockets=tuple(sockets.values()),
        _memory=segment,
    )


def connect_threads(name: str, ranks: Sequence[str], segment_bytes: SegmentBytes) -> list[Mesh]:
    """Connects several ranks that are threads of this process.

    Args:
        name: the name of the group in messages.
        ranks: the name of each rank in messages.
        segment_bytes: called with the number of ranks; returns the size of their shared memory in
            bytes, at least 1.

    Returns:
        The mesh of each rank.

    Raises:
        OSError: the process is out of memory or out of file descriptors.

    Example:
        >>> from tfdist._src.cluster.mesh.mesh import connect_threads
        >>> [mesh.rank for mesh in connect_threads("devices", ["CPU:0", "CPU:1"], lambda n: 4096)]
        [0, 1]
    """
    size = len(ranks)
    control = [[-1] * size for _ in ranks]
    owned: list[list[Descriptor | socket.socket]] = [[] for _ in ranks]
    for pair in itertools.combinations(range(size), 2):
        for rank, peer, sock in zip(pair, reversed(pair), socket.socketpair(), strict=True):
            sock.setblocking(False)
            control[rank][peer] = sock.fileno()
            owned[rank].append(close_on_fork(sock))
    memory = os.memfd_create("tfdist", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(memory, 0, segment_bytes(size))
        segments = [close_on_fork(Descriptor(os.dup(memory))) for _ in ranks]
    finally:
        os.close(memory)
    return [
        Mesh(
            name=f"{name}, {ranks[rank]}",
            rank=rank,
            size=size,
            ranks=tuple(ranks),
            hosts=(0,) * size,
            control=tuple(control[rank]),
            data=(-1,) * size,
            segment=segments[rank].fileno(),
            segment_bytes=segment_bytes(size),
            _sockets=tuple(owned[rank]),
            _memory=segments[rank],
        )
        for rank in range(size)
    ]
