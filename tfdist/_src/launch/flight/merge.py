"""Merges the logs of a job by communicator, and translates their times to a common clock."""

import functools
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tfdist._src.launch.flight.log import Communicator, Log, Peer, Record, parse

_NAME = re.compile(r"flight-rank(\d+)\.json")


@dataclass(frozen=True)
class Folder:
    """The flight logs of a folder.

    Attributes:
        path: the folder.
        logs: the logs of one job, in rank order.
        skipped: for each file that could not be used, a line with the file's name and the reason.
    """

    path: Path
    logs: tuple[Log, ...]
    skipped: tuple[str, ...]


def read(path: Path) -> Folder:
    """Reads all flight logs of a folder: the files with names such as `flight-rank0.json`.

    A log is skipped if its generation or its number of workers differs from that of the newest log,
    or if another log of the same rank has already been read.

    Raises:
        OSError: the folder cannot be read.
    """
    names = (_NAME.fullmatch(file.name) for file in path.iterdir())
    logs: list[tuple[str, Log]] = []
    skipped = []
    for name in sorted((int(match[1]), match[0]) for match in names if match):
        try:
            logs.append((name[1], parse((path / name[1]).read_bytes())))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            skipped.append(f"{name[1]}: {reason}")
    newest = max((log for _, log in logs), key=lambda log: log.unix_ns, default=None)
    used: dict[int, Log] = {}
    for file, log in logs:
        if newest is not None and log.generation != newest.generation:
            skipped.append(
                f"{file}: it is of generation {log.generation} of the workers, the newest log of "
                f"{newest.generation}"
            )
        elif newest is not None and log.size != newest.size:
            skipped.append(
                f"{file}: it is of a job of {log.size} workers, the newest log of {newest.size}"
            )
        elif used.setdefault(log.rank, log) is not log:
            skipped.append(f"{file}: it is a second log of rank {log.rank}")
    return Folder(path, tuple(used[rank] for rank in sorted(used)), tuple(skipped))


# If the clocks of two hosts were not compared, their Unix times are assumed to differ by at most
# this number of nanoseconds.
_UNIX_UNCERTAINTY_NS = 1_000_000_000


@dataclass(frozen=True)
class Clock:
    """A translation of the times in a log to shared time.

    Shared time is the Unix time of one of the hosts. The times of all logs are translated to it, so
    that they can be compared with one another.

    Attributes:
        shift_ns: the number of nanoseconds to add to a time of the log's steady clock.
        uncertainty_ns: the maximum error of a translated time.
        clock_group: a number that is the same for two logs if the workers had compared the two
            clocks, directly or through the clocks of other logs.
    """

    shift_ns: int
    uncertainty_ns: int
    clock_group: int


def uncertainty_ns(one: Clock, other: Clock) -> int:
    """Returns the maximum error of the difference between a time on `one` and a time on `other`."""
    if one is other:
        return 0
    between_groups = 0 if one.clock_group == other.clock_group else _UNIX_UNCERTAINTY_NS
    return one.uncertainty_ns + other.uncertainty_ns + between_groups


def compare(logs: Sequence[Log]) -> list[Clock]:
    """Computes the clock of each log.

    If possible, the translation uses the clock offsets that the workers have measured, in a chain
    through as few logs as possible. Workers of one host have the same steady clock, so that their
    offset is 0. For logs that no chain of offsets connects, Unix time is used.
    """
    index = {log.worker: i for i, log in enumerate(logs)}
    edges: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for i, log in enumerate(logs):
        for worker, offset, uncertainty in _offsets(log):
            j = index.get(worker, i)
            if j != i:
                edges[i].append((j, offset, uncertainty))
                edges[j].append((i, -offset, uncertainty))
    clocks: dict[int, Clock] = {}
    for first, log in enumerate(logs):
        if first in clocks:
            continue
        clocks[first] = Clock(log.unix_ns - log.steady_ns, 0, first)
        waiting = deque([first])
        while waiting:
            i = waiting.popleft()
            for j, offset, uncertainty in sorted(edges[i], key=lambda edge: edge[2]):
                if j not in clocks:
                    total = clocks[i].uncertainty_ns + uncertainty
                    clocks[j] = Clock(clocks[i].shift_ns - offset, total, first)
                    waiting.append(j)
    return [clocks[i] for i in range(len(logs))]


def _offsets(log: Log) -> Iterable[tuple[str, int, int]]:
    """Yields the clock offsets that a log contains.

    Each item has the name of another worker, the time on its steady clock minus the time on this
    worker's steady clock, and the maximum error of this difference.
    """
    for group in log.communicators:
        own = group.hosts[group.rank]
        for peer in group.peers:
            if group.hosts[peer.rank] == own:
                yield group.ranks[peer.rank], 0, 0
            elif peer.clock_offset_ns is not None:
                uncertainty = peer.clock_uncertainty_ns or 0
                yield group.ranks[peer.rank], peer.clock_offset_ns, uncertainty


@dataclass(frozen=True, eq=False)
class Member:
    """A rank of a group, with the log of its worker.

    Attributes:
        log: the log of the rank's worker.
        communicator: the part of the log that describes the group's communicator.
        clock: translates the times in the log to shared time.
    """

    log: Log
    communicator: Communicator
    clock: Clock

    def time(self, steady_ns: int) -> int:
        """Translates a time in the log to shared time, in nanoseconds."""
        return steady_ns + self.clock.shift_ns

    @property
    def name(self) -> str:
        """The name of the rank's worker in messages."""
        return self.communicator.ranks[self.communicator.rank]

    def is_on_host_of(self, rank: int) -> bool:
        """Whether this member is on the same host as another rank of the group."""
        hosts = self.communicator.hosts
        return hosts[rank] == hosts[self.communicator.rank]

    @property
    def written(self) -> int:
        """When the log was written, in shared time."""
        return self.time(self.log.steady_ns)

    def until(self, record: Record) -> int:
        """Returns when a recorded operation ended, in shared time.

        If the operation had not ended when the log was written, returns the time of writing.
        """
        return self.time(record.ended_ns) if record.ended_ns else self.written

    @functools.cached_property
    def collective(self) -> Record | None:
        """The most recent collective in the log; None if the log contains only messages."""
        records = reversed(self.communicator.records)
        return next((record for record in records if not record.is_message), None)

    @functools.cached_property
    def current(self) -> Record | None:
        """The operation that is in progress on this rank; None if there is none.

        If the last operations have failed, it is the first of them, because its failure has caused
        the other failures.
        """
        found = None
        for record in reversed(self.communicator.records):
            if not record.is_open:
                break
            found = record
        return found

    @property
    def joined(self) -> int | None:
        """The number of the last collective that this rank has joined; 0 if it has joined none.

        None if the number is unknown, because newer records have overwritten the collective's.
        """
        if self.collective is not None:
            return self.collective.sequence
        records = self.communicator.records
        return None if records and records[0].number > 1 else 0


@dataclass(frozen=True)
class Worker:
    """A worker with a log.

    Attributes:
        log: its log.
        clock: translates the times in the log to shared time.
        members: for each communicator in the log, the worker's rank in it.
    """

    log: Log
    clock: Clock
    members: tuple[Member, ...]

    def time(self, steady_ns: int) -> int:
        """Translates a time in the log to shared time, in nanoseconds."""
        return steady_ns + self.clock.shift_ns

    @property
    def written(self) -> int:
        """When the log was written, in shared time."""
        return self.time(self.log.steady_ns)


@dataclass(frozen=True, eq=False)
class Group:
    """A communicator, as described by the logs of some or all of its ranks.

    Attributes:
        name: the communicator's name.
        ranks: the names of the communicator's workers, in rank order.
        members: the ranks with a log that contains the communicator.
        outside: the ranks with a log that does not contain the communicator. Their workers have
            closed the communicator, or have not created it yet.
        heard: for each rank, the last status of this rank that each member has received.
    """

    name: str
    ranks: tuple[str, ...]
    members: dict[int, Member] = field(default_factory=dict)
    outside: dict[int, Worker] = field(default_factory=dict)
    heard: dict[int, list[tuple[Member, Peer]]] = field(default_factory=lambda: defaultdict(list))

    @functools.cached_property
    def _begun(self) -> dict[int, dict[int, int]]:
        """For the number of each collective, a dict from each rank to when it began the collective.

        The times are in shared time.
        """
        begun: dict[int, dict[int, int]] = defaultdict(dict)
        for rank, member in self.members.items():
            for record in member.communicator.records:
                if not record.is_message:
                    begun[record.sequence][rank] = member.time(record.begun_ns)
        return begun

    def last(self, rank: int, record: Record) -> int:
        """Returns the rank for which `rank` waited last in an operation; -1 if it waited for none.

        `record.last` is not always this rank. If hosts have several ranks, a rank notices only some
        ranks of another host, and such a rank may itself wait for other ranks of its host.
        Therefore the method returns the rank that began the collective last. If the clocks are too
        inaccurate to identify this rank, the method returns `record.last`.

        Args:
            rank: the rank that waited.
            record: the record of the operation in the log of `rank`.
        """
        begun = {} if record.is_message else self._begun[record.sequence]
        if record.kind == "broadcast" or record.last not in begun:
            return record.last
        latest = max(begun, key=begun.__getitem__)
        # If `rank` began last itself, it waited for `record.last` to finish earlier work.
        if latest == rank:
            return record.last
        uncertainty = uncertainty_ns(self.members[latest].clock, self.members[record.last].clock)
        return latest if begun[latest] - begun[record.last] > uncertainty else record.last

    def joined(self, rank: int) -> int | None:
        """Returns the number of the last collective that the rank is known to have joined.

        None if the logs contain no information about the rank. The rank may have joined later
        collectives.
        """
        known = [peer.sequence for _, peer in self.heard[rank]]
        own = self.members[rank].joined if rank in self.members else None
        return max(known if own is None else [*known, own], default=None)

    def log(self, rank: int) -> Log | None:
        """Returns the log of a rank's worker, if it exists."""
        owner = self.members.get(rank) or self.outside.get(rank)
        return owner.log if owner is not None else None

    def host(self, rank: int) -> str:
        """Returns the name of a rank's host; "" if no rank of the host has a log."""
        own = self.log(rank)
        hosts = (m.log.host for m in self.members.values() if m.is_on_host_of(rank))
        return own.host if own is not None else next(hosts, "")

    def heard_last(self, rank: int) -> tuple[Member, Peer] | None:
        """Returns the last status that any member received from the rank, and this member."""
        heard = ((by, peer) for by, peer in self.heard[rank] if peer.heard_ns)
        return max(heard, key=lambda pair: pair[0].time(pair[1].heard_ns), default=None)


@dataclass(frozen=True)
class Job:
    """A job, as described by the merged logs of its workers.

    Attributes:
        workers: the workers with a log, in rank order.
        groups: the communicators, in the order in which they appear in the logs.
    """

    workers: tuple[Worker, ...]
    groups: tuple[Group, ...]

    @property
    def size(self) -> int:
        """The number of workers of the job, including workers without a log."""
        return max((worker.log.size for worker in self.workers), default=0)

    def without_log(self) -> tuple[str, ...]:
        """Returns the names of the workers without a log.

        If no log contains the name of such a worker, its name is "rank" followed by its rank.
        """
        names = {rank: f"rank {rank}" for rank in range(self.size)}
        for group in self.groups:
            in_order = all(rank == member.log.rank for rank, member in group.members.items())
            if len(group.ranks) == self.size and in_order:
                names |= dict(enumerate(group.ranks))
        there = {worker.log.rank for worker in self.workers}
        return tuple(name for rank, name in sorted(names.items()) if rank not in there)


def merge(logs: Sequence[Log]) -> Job:
    """Merges the logs of one job.

    Args:
        logs: the logs, in rank order; at most one log for each rank.
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


@dataclass(frozen=True)
class Total:
    """How long a worker waited for others, and others for this worker, in the recorded operations.

    Attributes:
        worker: the worker's name.
        waited_for: the number of seconds that the other workers waited, in total, in operations
            that this worker joined last.
        waited: the number of seconds that this worker waited in all operations.
    """

    worker: str
    waited_for: float
    waited: float


def add_up(job: Job) -> tuple[Total, ...]:
    """Adds up the waits of each worker.

    A wait begins when the worker begins an operation. It ends when the worker notices that the last
    of the other ranks has joined the operation.

    Returns:
        The totals of all workers that waited, or for which others waited. The worker for which
        others waited longest is first.
    """
    waited_for: dict[str, int] = defaultdict(int)
    waited: dict[str, int] = defaultdict(int)
    for group, member in ((g, m) for g in job.groups for m in g.members.values()):
        for record in member.communicator.records:
            nanoseconds = record.last_arrived_ns - record.begun_ns
            if record.last >= 0 and nanoseconds > 0:
                waited_for[group.ranks[group.last(member.communicator.rank, record)]] += nanoseconds
                waited[member.name] += nanoseconds
    totals = (Total(w, waited_for[w] / 1e9, waited[w] / 1e9) for w in {**waited_for, **waited})
    return tuple(sorted(totals, key=lambda total: (-total.waited_for, -total.waited)))
