"""Splits the ranks of a session into subgroups.

All ranks send a report to rank 0, which computes the subgroups from the reports.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from tfdist._src.cluster.cluster_spec import Topology
from tfdist._src.cluster.net.listener import Ports
from tfdist._src.cluster.session.session import Report
from tfdist._src.options import Options
from tfdist.errors import ProgramMismatchError

Runs = list[list[int]]
"""Arithmetic sequences, one after another, each as [start, step, count]."""


def to_runs(numbers: Sequence[int]) -> Runs:
    """Converts a list to runs: arithmetic sequences, each written as [start, step, count].

    Example:
        >>> to_runs([0, 1, 2, 3, 7, 7, 7])
        [[0, 1, 4], [7, 0, 3]]
    """
    runs: Runs = []
    for number in numbers:
        if runs:
            start, step, count = runs[-1]
            if count == 1:
                runs[-1] = [start, number - start, 2]
                continue
            if number == start + step * count:
                runs[-1][2] += 1
                continue
        runs.append([number, 0, 1])
    return runs


def from_runs(runs: Iterable[Sequence[int]]) -> list[int]:
    """Converts the result of `to_runs` back to the list.

    Example:
        >>> from_runs([[0, 1, 4], [7, 0, 3]])
        [0, 1, 2, 3, 7, 7, 7]
    """
    return [start + step * i for start, step, count in runs for i in range(count)]


MEMORY = "/dev/shm"
"""The folder of shared memory files."""

_BOOT = "/proc/sys/kernel/random/boot_id"
_NETWORK = "/proc/self/ns/net"


def host_key(options: Options) -> str:
    """Returns a key that identifies the host of this process.

    Two processes have the same key if and only if they run on the same host. Two containers on one
    machine count as the same host only if they share the network namespace and /dev/shm.

    Args:
        options: the job's options. `host` overrides the automatic detection.

    Returns:
        A string that the caller may only compare with other keys.

    Example:
        >>> host_key(Options(host="a"))
        'TFDIST_HOST a'
    """
    if options.host:
        return f"TFDIST_HOST {options.host}"
    return f"boot {_boot()} network {_network()} memory {_memory()}"


def numbered(keys: Sequence[Hashable]) -> tuple[int, ...]:
    """Returns the number of each key; keys are numbered in the order of their first appearance.

    Example:
        >>> numbered(["a", "b", "a", "c"])
        (0, 1, 0, 2)
    """
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(key, len(numbers)) for key in keys)


def _boot() -> str:
    """Returns an id of this machine, which changes when the machine restarts."""
    try:
        with open(_BOOT) as file:
            return file.read().strip()
    except (OSError, ValueError):
        return socket.gethostname()


def _network() -> str:
    try:
        return str(os.stat(_NETWORK).st_ino)
    except OSError:
        return socket.gethostname()


def _memory() -> str:
    try:
        return str(os.stat(MEMORY).st_dev)
    except OSError:  # no memory can be shared; creating a segment then reports the reason
        return "none"


@dataclass(frozen=True)
class Subgroup:
    """A group of ranks of a session. The ranks of a group are numbered from 0.

    Attributes:
        identity: a random text that identifies the group.
        members: the session rank of each rank of the group.
        rank: the rank of this process in the group.
        names: the name of each rank in messages.
        addresses: the `"host:port"` of each rank in the cluster; empty for a single process.
        ports: the ports at which each rank listens. None if the rank listens at the port of its
            address.
        hosts: the host number of each rank. Hosts are numbered in the order in which they first
            appear among the ranks.
    """

    identity: str
    members: tuple[int, ...]
    rank: int
    names: tuple[str, ...]
    addresses: tuple[str, ...]
    ports: tuple[Ports | None, ...]
    hosts: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.members)

    def colocated(self, rank: int) -> list[int]:
        """Returns the ranks on the same host as `rank`, including `rank`."""
        return [other for other in range(self.size) if self.hosts[other] == self.hosts[rank]]

    def without_memory(self, ranks: Sequence[int]) -> Subgroup:
        """Returns a copy of the group in which each of these ranks has a host of its own.

        These ranks cannot share memory, so they communicate as if they were on different hosts.
        """
        alone = frozenset(ranks)
        keys = [("rank", r) if r in alone else ("host", h) for r, h in enumerate(self.hosts)]
        return replace(self, hosts=numbered(keys))


def check_members(members: Sequence[int], topology: Topology) -> None:
    """Checks the list of members that this rank has passed to `connect`.

    Raises:
        ValueError: the list contains a rank twice or an invalid rank, or does not contain this
            rank.
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


class SessionPlan:
    """The plan by which rank 0 splits a session into groups. It is based on reports of all ranks.

    The time to compute the plan is proportional to the number of ranks. In most cases, the size of
    the reply to each rank does not depend on the number of ranks.

    Args:
        topology: all workers of the session.
        subject: the name of the group in messages.
    """

    def __init__(self, topology: Topology, subject: str) -> None:
        self._topology = topology
        self._subject = subject
        self._group_of: list[int] = []  # the group number of each rank; -1 without a group
        self._members: list[list[int]] = []
        self._hosts: list[tuple[int, ...]] = []

    def split(self, reports: Sequence[Report]) -> list[Report]:
        """Computes the groups.

        Args:
            reports: the report of each rank, a dict with the keys `"members"` (as runs),
                `"identity"`, `"host"` and `"ports"`. The ports are None if the rank listens at the
                port of its address.

        Returns:
            For each rank, the description of its group, which `group_of` decodes.

        Raises:
            ProgramMismatchError: two ranks of the same group have passed different members.
        """
        numbers: dict[str, int] = {}
        self._group_of = [
            numbers.setdefault(str(report["members"]), len(numbers)) if report["members"] else -1
            for report in reports
        ]
        found: list[Report] = []
        for number in numbers.values():
            first = self._group_of.index(number)
            members = from_runs(reports[first]["members"])
            for member in members:
                if self._group_of[member] != number:
                    raise self._mismatch(first, member, reports)
            hosts = numbered([reports[member]["host"] for member in members])
            self._members.append(members)
            self._hosts.append(hosts)
            ports = {i: reports[m]["ports"] for i, m in enumerate(members) if reports[m]["ports"]}
            found.append(
                {
                    "members": reports[first]["members"],
                    "identity": reports[members[0]]["identity"],
                    **_describe_hosts(hosts),
                    "ports": ports,
                }
            )
        sets = [frozenset(members) for members in self._members]
        for rank, number in enumerate(self._group_of):
            if number >= 0 and rank not in sets[number]:
                raise self._mismatch(rank, self._members[number][0], reports)
        return [found[number] if number >= 0 else {} for number in self._group_of]

    def share(self, reports: Sequence[Report]) -> list[Report]:
        """Tells each rank the name of the shared memory on its host.

        Args:
            reports: the report of each rank, a dict. It contains the key `"name"` if the rank has
                created the shared memory of its host.

        Returns:
            For each rank, a dict with the keys `"name"` and `"without"`. The name is None if the
            rank's host has no shared memory. The value of `"without"` lists all ranks of the group
            that run on hosts without shared memory, as runs.
        """
        told: list[Report] = [{} for _ in reports]
        for members, hosts in zip(self._members, self._hosts, strict=True):
            names: dict[int, str | None] = {}
            for member, host in zip(members, hosts, strict=True):
                names.setdefault(host, reports[member].get("name"))
            without = to_runs([i for i, host in enumerate(hosts) if names[host] is None])
            for member, host in zip(members, hosts, strict=True):
                told[member] = {"name": names[host], "without": without}
        return told

    def _mismatch(self, one: int, other: int, reports: Sequence[Report]) -> ProgramMismatchError:
        first, second = sorted((one, other))
        given = [from_runs(reports[rank]["members"]) for rank in (first, second)]
        return ProgramMismatchError(
            f"{self._subject}: {_name(self._topology, first)} passed the members {given[0]}, but "
            f"{_name(self._topology, second)} passed {given[1]}. Pass the same list on all members."
        )


def group_of(topology: Topology, told: Report) -> Subgroup | None:
    """Returns the group of this process.

    Args:
        topology: all workers of the session.
        told: the description of the group that rank 0 has sent (see `SessionPlan.split`).

    Returns:
        The group; None if this process does not belong to a group.
    """
    if not told:
        return None
    members = tuple(from_runs(told["members"]))
    ports = told["ports"]
    return Subgroup(
        identity=told["identity"],
        members=members,
        rank=members.index(topology.rank),
        names=tuple(_name(topology, member) for member in members),
        addresses=tuple(topology.workers[member].address for member in members)
        if topology.workers
        else (),
        ports=tuple(ports.get(str(rank)) for rank in range(len(members))),
        hosts=_hosts_of(told),
    )


def _describe_hosts(hosts: Sequence[int]) -> Report:
    """Returns a short description of the hosts of all ranks.

    If the ranks of each host are consecutive, the description contains the number of ranks on each
    host. Otherwise, it contains the host number of each rank.
    """
    if list(hosts) == sorted(hosts):
        return {"ranks_per_host": to_runs([len(list(ranks)) for _, ranks in groupby(hosts)])}
    return {"hosts": to_runs(hosts)}


def _hosts_of(told: Report) -> tuple[int, ...]:
    if "hosts" in told:
        return tuple(from_runs(told["hosts"]))
    sizes = enumerate(from_runs(told["ranks_per_host"]))
    return tuple(host for host, size in sizes for _ in range(size))


def _name(topology: Topology, rank: int) -> str:
    return str(topology.workers[rank]) if topology.workers else "this process"
