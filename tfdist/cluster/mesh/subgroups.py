"""The groups into which a session splits, computed by every rank from the reports of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tfdist.cluster.mesh.colocation import numbered
from tfdist.cluster.net.listener import Ports
from tfdist.cluster.session.lockstep import Report
from tfdist.cluster.spec.topology import Topology
from tfdist.errors import ProgramMismatchError


@dataclass(frozen=True)
class Subgroup:
    """A group of ranks, renumbered from 0.

    Attributes:
        identity: unique to the group.
        members: session rank of each rank of the group.
        rank: this process's rank in the group.
        names: what messages call each rank.
        addresses: each rank's entry in the cluster; empty for a single process.
        ports: the ports at which each rank listens.
        hosts: host number of each rank; hosts are numbered in order of first appearance.
    """

    identity: str
    members: tuple[int, ...]
    rank: int
    names: tuple[str, ...]
    addresses: tuple[str, ...]
    ports: tuple[Ports, ...]
    hosts: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.members)

    def colocated(self, rank: int) -> list[int]:
        """All ranks on the same host as this one, including itself."""
        return [other for other in range(self.size) if self.hosts[other] == self.hosts[rank]]

    def without_memory(self, ranks: Sequence[int]) -> Subgroup:
        """The group with these ranks sharing nothing, as if each were on a separate host."""
        keys = [("rank", r) if r in ranks else ("host", h) for r, h in enumerate(self.hosts)]
        return replace(self, hosts=numbered(keys))


def check_members(members: Sequence[int], topology: Topology) -> None:
    """Checks this rank's list of members.

    Raises:
        ValueError: the list is invalid for this rank.
    """
    known = range(topology.size)
    if len(set(members)) != len(members) or any(member not in known for member in members):
        raise ValueError(
            f"members must be distinct ranks from 0 to {topology.size - 1}. "
            f"Received: {list(members)}. List each rank of the group once."
        )
    if members and topology.rank not in members:
        raise ValueError(
            f"members must contain this process's rank {topology.rank}, or be empty. "
            f"Received: {list(members)}. Pass each rank the members of its group."
        )


def group_of(topology: Topology, reports: Sequence[Report], subject: str) -> Subgroup | None:
    """The group of this process.

    Args:
        topology: the session's ranks.
        reports: `"members"`, `"identity"`, `"host"` and `"ports"` of each of them.
        subject: what messages call the group.

    Returns:
        The group; None if this process is in no group.

    Raises:
        ProgramMismatchError: two ranks of one group passed different members; raised on all ranks.
    """
    for rank, report in enumerate(reports):
        for other in report["members"]:
            if reports[other]["members"] != report["members"]:
                raise ProgramMismatchError(
                    f"{subject}: {_name(topology, rank)} passed the members {report['members']}, "
                    f"but {_name(topology, other)} passed {reports[other]['members']}. Pass the "
                    f"same list on all members."
                )
    members = tuple(reports[topology.rank]["members"])
    if not members:
        return None
    return Subgroup(
        identity=reports[members[0]]["identity"],
        members=members,
        rank=members.index(topology.rank),
        names=tuple(_name(topology, member) for member in members),
        addresses=tuple(topology.workers[member].address for member in members)
        if topology.workers
        else (),
        ports=tuple(reports[member]["ports"] for member in members),
        hosts=numbered([reports[member]["host"] for member in members]),
    )


def _name(topology: Topology, rank: int) -> str:
    return str(topology.workers[rank]) if topology.workers else "this process"
