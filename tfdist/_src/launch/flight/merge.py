"""The logs of a job merged: by communicator, with times that all of them share."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tfdist._src.launch.flight.clocks import Clock, compare, doubt_ns
from tfdist._src.launch.flight.log import Communicator, Log, Peer, Record


@dataclass(frozen=True, eq=False)
class Member:
    """A rank of a group whose log is there.

    Attributes:
        log: its log.
        communicator: the log's part about the group.
        clock: how its times translate.
    """

    log: Log
    communicator: Communicator
    clock: Clock

    def time(self, steady_ns: int) -> int:
        """A time of the log, in nanoseconds of the time that all logs share."""
        return steady_ns + self.clock.shift_ns

    @property
    def name(self) -> str:
        """What messages call the rank."""
        return self.communicator.ranks[self.communicator.rank]

    def is_on_host_of(self, rank: int) -> bool:
        """Whether another rank of the group is on the same host."""
        hosts = self.communicator.hosts
        return hosts[rank] == hosts[self.communicator.rank]

    @property
    def written(self) -> int:
        """When the log was written, in shared time."""
        return self.time(self.log.steady_ns)

    def until(self, record: Record) -> int:
        """The end of a record, or of what the log knows of it, in shared time."""
        return self.time(record.ended_ns) if record.ended_ns else self.written

    @functools.cached_property
    def collective(self) -> Record | None:
        """The last collective."""
        records = reversed(self.communicator.records)
        return next((record for record in records if not record.is_message), None)

    @functools.cached_property
    def current(self) -> Record | None:
        """What the rank is in, or what failed; later ones only failed because of that."""
        found = None
        for record in reversed(self.communicator.records):
            if not record.is_open:
                break
            found = record
        return found

    @property
    def joined(self) -> int | None:
        """The number of the last collective joined; None if its record is lost."""
        if self.collective is not None:
            return self.collective.sequence
        records = self.communicator.records
        return None if records and records[0].number > 1 else 0


@dataclass(frozen=True)
class Worker:
    """A worker whose log is there.

    Attributes:
        log: its log.
        clock: how its times translate.
        members: its ranks in communicators.
    """

    log: Log
    clock: Clock
    members: tuple[Member, ...]

    def time(self, steady_ns: int) -> int:
        """A time of the log, in nanoseconds of the time that all logs share."""
        return steady_ns + self.clock.shift_ns

    @property
    def written(self) -> int:
        """When the log was written, in shared time."""
        return self.time(self.log.steady_ns)


@dataclass(frozen=True, eq=False)
class Group:
    """A communicator, as the logs of some or all of its ranks show it.

    Attributes:
        name: its name.
        ranks: the names of its workers.
        members: the ranks whose logs show the communicator.
        outside: the ranks whose logs do not show it: it is closed there, or not made yet.
        heard: for each rank, what members last heard of it.
    """

    name: str
    ranks: tuple[str, ...]
    members: dict[int, Member] = field(default_factory=dict)
    outside: dict[int, Worker] = field(default_factory=dict)
    heard: dict[int, list[tuple[Member, Peer]]] = field(default_factory=lambda: defaultdict(list))

    @functools.cached_property
    def _begun(self) -> dict[int, dict[int, int]]:
        """When ranks began collectives, by their number, in shared time."""
        begun: dict[int, dict[int, int]] = defaultdict(dict)
        for rank, member in self.members.items():
            for record in member.communicator.records:
                if not record.is_message:
                    begun[record.sequence][rank] = member.time(record.begun_ns)
        return begun

    def last(self, rank: int, record: Record) -> int:
        """The rank that `rank` waited for last in this record of it; -1 for none.

        Where hosts have several ranks, a rank notices some ranks of other hosts, which may wait for
        their neighbours. So it is the rank that began last, unless the clocks leave that in doubt.
        """
        begun = {} if record.is_message else self._begun[record.sequence]
        if record.kind == "broadcast" or record.last not in begun:
            return record.last
        latest = max(begun, key=begun.__getitem__)
        if latest == rank:  # It waited for what the one that it noticed had to do first.
            return record.last
        doubt = doubt_ns(self.members[latest].clock, self.members[record.last].clock)
        return latest if begun[latest] - begun[record.last] > doubt else record.last

    def joined(self, rank: int) -> int | None:
        """The number of the last collective that the rank is known to have joined, or None."""
        known = [peer.sequence for _, peer in self.heard[rank]]
        own = self.members[rank].joined if rank in self.members else None
        return max(known if own is None else [*known, own], default=None)

    def log(self, rank: int) -> Log | None:
        """The log of a rank's worker, if it is there."""
        owner = self.members.get(rank) or self.outside.get(rank)
        return owner.log if owner is not None else None

    def host(self, rank: int) -> str:
        """The name of a rank's host, as a rank of the same host has it; "" if none has a log."""
        own = self.log(rank)
        hosts = (m.log.host for m in self.members.values() if m.is_on_host_of(rank))
        return own.host if own is not None else next(hosts, "")

    def heard_last(self, rank: int) -> tuple[Member, Peer] | None:
        """Who heard of the rank last, and what."""
        heard = ((by, peer) for by, peer in self.heard[rank] if peer.heard_ns)
        return max(heard, key=lambda pair: pair[0].time(pair[1].heard_ns), default=None)


@dataclass(frozen=True)
class Job:
    """The merged logs.

    Attributes:
        workers: those whose logs are there, by rank.
        groups: the communicators, in the order in which the logs name them.
    """

    workers: tuple[Worker, ...]
    groups: tuple[Group, ...]

    @property
    def size(self) -> int:
        """The number of workers, with and without a log."""
        return max((worker.log.size for worker in self.workers), default=0)

    def without_log(self) -> tuple[str, ...]:
        """The workers whose log is missing; by rank where no log has their names."""
        names = {rank: f"rank {rank}" for rank in range(self.size)}
        for group in self.groups:
            in_order = all(rank == member.log.rank for rank, member in group.members.items())
            if len(group.ranks) == self.size and in_order:
                names |= dict(enumerate(group.ranks))
        there = {worker.log.rank for worker in self.workers}
        return tuple(name for rank, name in sorted(names.items()) if rank not in there)


def merge(logs: Sequence[Log]) -> Job:
    """Merges logs of one job.

    Args:
        logs: at most one per rank, by rank.
    """
    groups: dict[tuple[str, tuple[str, ...]], Group] = {}
    workers = []
    for log, clock in zip(logs, compare(logs), strict=True):
        members = tuple(Member(log, part, clock) for part in log.communicators)
        workers.append(Worker(log, clock, members))
        for member in members:
            key = member.communicator.name, member.communicator.ranks
            group = groups.setdefault(key, Group(*key))
            group.members[member.communicator.rank] = member
            for peer in member.communicator.peers:
                group.heard[peer.rank].append((member, peer))
    by_name = {worker.log.worker: worker for worker in workers}
    for group in groups.values():
        for rank in set(range(len(group.ranks))) - set(group.members):
            if group.ranks[rank] in by_name:
                group.outside[rank] = by_name[group.ranks[rank]]
    return Job(tuple(workers), tuple(groups.values()))
