"""Who forms a group with whom, worked out by every rank from what all of them say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tfdist.cluster.mesh.colocation import numbered
from tfdist.cluster.net.listener import Ports
from tfdist.cluster.session.lockstep import Said
from tfdist.cluster.spec.topology import Topology
from tfdist.errors import ProgramMismatchError


@dataclass(frozen=True)
class Subgroup:
    """A group of ranks, numbered anew from 0.

    Attributes:
        identity: differs between any two groups.
        members: for each rank of the group its rank in the session.
        rank: this process's rank in the group.
        names: what messages call each rank.
        addresses: each rank's entry in the cluster; none for a process alone.
        ports: where each rank listens.
        hosts: for each rank the number of its host, in the order in which they first come.
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

    def neighbours(self, rank: int) -> list[int]:
        """All ranks on the host of this one, itself included."""
        return [other for other in range(self.size) if self.hosts[other] == self.hosts[rank]]

    def without_memory(self, ranks: Sequence[int]) -> Subgroup:
        """The group where these ranks share nothing, as if each were on a host of its own."""
        keys = [("rank", r) if r in ranks else ("host", h) for r, h in enumerate(self.hosts)]
        return replace(self, hosts=numbered(keys))


def check_members(members: Sequence[int], topology: Topology) -> None:
    """Checks one rank's own list.

    Raises:
        ValueError: it can be no group of this rank.
    """
    known = range(topology.size)
    if len(set(members)) != len(members) or any(member not in known for member in members):
        raise ValueError(
            f"members must be different ranks from 0 to {topology.size - 1}. "
            f"Received: {list(members)}. Give each rank of the group once."
        )
    if members and topology.rank not in members:
        raise ValueError(
            f"members must hold this process's own rank {topology.rank}, or be empty. "
            f"Received: {list(members)}. Give each rank the list of its own group."
        )


def group_of(topology: Topology, said: Sequence[Said], subject: str) -> Subgroup | None:
    """The group of this process.

    Args:
        topology: the session's ranks.
        said: for each of them `"members"`, `"identity"`, `"host"` and `"ports"`.
        subject: what the group is for, in messages.

    Returns:
        The group; None where this process is in none.

    Raises:
        ProgramMismatchError: two ranks of one group name different members; on all ranks.
    """
    for rank, one in enumerate(said):
        for other in one["members"]:
            if said[other]["members"] != one["members"]:
                raise ProgramMismatchError(
                    f"{subject}: {_name(topology, rank)} names the members {one['members']}, but "
                    f"{_name(topology, other)} names {said[other]['members']}. Give the same list "
                    f"on all its members."
                )
    members = tuple(said[topology.rank]["members"])
    if not members:
        return None
    return Subgroup(
        identity=said[members[0]]["identity"],
        members=members,
        rank=members.index(topology.rank),
        names=tuple(_name(topology, member) for member in members),
        addresses=tuple(topology.workers[member].address for member in members)
        if topology.workers
        else (),
        ports=tuple(said[member]["ports"] for member in members),
        hosts=numbered([said[member]["host"] for member in members]),
    )


def _name(topology: Topology, rank: int) -> str:
    return str(topology.workers[rank]) if topology.workers else "this process"
