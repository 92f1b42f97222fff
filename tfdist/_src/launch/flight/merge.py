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
        logs: the logs of one job, by rank.
        skipped: a line for each file that could not be used.
    """

    path: Path
    logs: tuple[Log, ...]
    skipped: tuple[str, ...]


def read(path: Path) -> Folder:
    """Reads every `flight-rank*.json` of a folder; other files are ignored.

    Skips a log if its generation or number of workers differs from the newest log's, or if it is
    the second log of a rank.

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


# The assumed maximum difference between the Unix times of two hosts if their clocks were not
# compared.
_UNIX_UNCERTAINTY_NS = 1_000_000_000


@dataclass(frozen=True)
class Clock:
    """Translates a log's times to shared time, the Unix time of one of the hosts.

    Attributes:
        shift_ns: the offset to add to a time of the log's steady clock.
        uncertainty_ns: the maximum error of the result.
        clock_group: a number that two logs share if their clocks were compared, directly or through
            other logs.
    """

    shift_ns: int
    uncertainty_ns: int
    clock_group: int


def uncertainty_ns(one: Clock, other: Clock) -> int:
    """Returns the maximum error of a time difference between moments on these two clocks."""
    if one is other:
        return 0
    between_groups = 0 if one.clock_group == other.clock_group else _UNIX_UNCERTAINTY_NS
    return one.uncertainty_ns + other.uncertainty_ns + between_groups


def compare(logs: Sequence[Log]) -> list[Clock]:
    """Computes the clock of each log.

    Two logs are connected by measured clock offsets if possible, over the fewest possible hosts.
    Workers of one host have the same steady clock. Unix time connects all other logs.
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
    """Yields the clock offsets of other workers in this log: name, offset, uncertainty."""
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
    """A rank of a group, with its log.

    Attributes:
        log: its log.
        communicator: the log's part about the group.
        clock: the translation of its times.
    """

    log: Log
    communicator: Communicator
    clock: Clock

    def time(self, steady_ns: int) -> int:
        """Translates a time of the log to shared time, in nanoseconds."""
        return steady_ns + self.clock.shift_ns

    @property
    def name(self) -> str:
        """The name of the rank in messages."""
        return self.communicator.ranks[self.communicator.rank]

    def is_on_host_of(self, rank: int) -> bool:
        """Whether another rank of the group is on the same host."""
        hosts = self.communicator.hosts
        return hosts[rank] == hosts[self.communicator.rank]

    @property
    def written(self) -> int:
        """The time of writing of the log, in shared time."""
        return self.time(self.log.steady_ns)

    def until(self, record: Record) -> int:
        """The end of a record, or of the log if the record has none, in shared time."""
        return self.time(record.ended_ns) if record.ended_ns else self.written

    @functools.cached_property
    def collective(self) -> Record | None:
        """The last collective."""
        records = reversed(self.communicator.records)
        return next((record for record in records if not record.is_message), None)

    @functools.cached_property
    def current(self) -> Record | None:
        """The current operation; after failures, the first failed one, which caused the others."""
        found = None
        for record in reversed(self.communicator.records):
            if not record.is_open:
                break
            found = record
        return found

    @property
    def joined(self) -> int | None:
        """The number of the last collective joined; None if its record was overwritten."""
        if self.collective is not None:
            return self.collective.sequence
        records = self.communicator.records
        return None if records and records[0].number > 1 else 0


@dataclass(frozen=True)
class Worker:
    """A worker with a log.

    Attributes:
        log: its log.
        clock: the translation of its times.
        members: its ranks in communicators.
    """

    log: Log
    clock: Clock
    members: tuple[Member, ...]

    def time(self, steady_ns: int) -> int:
        """Translates a time of the log to shared time, in nanoseconds."""
        return steady_ns + self.clock.shift_ns

    @property
    def written(self) -> int:
        """The time of writing of the log, in shared time."""
        return self.time(self.log.steady_ns)


@dataclass(frozen=True, eq=False)
class Group:
    """A communicator, as shown by the logs of some or all of its ranks.

    Attributes:
        name: its name.
        ranks: the names of its workers.
        members: the ranks with a log that shows the communicator.
        outside: the ranks with a log that does not show it, because the worker has closed it or not
            created it yet.
        heard: for each rank, the members' latest information about it.
    """

    name: str
    ranks: tuple[str, ...]
    members: dict[int, Member] = field(default_factory=dict)
    outside: dict[int, Worker] = field(default_factory=dict)
    heard: dict[int, list[tuple[Member, Peer]]] = field(default_factory=lambda: defaultdict(list))

    @functools.cached_property
    def _begun(self) -> dict[int, dict[int, int]]:
        """The shared time at which each rank began each collective, by the collective's number."""
        begun: dict[int, dict[int, int]] = defaultdict(dict)
        for rank, member in self.members.items():
            for record in member.communicator.records:
                if not record.is_message:
                    begun[record.sequence][rank] = member.time(record.begun_ns)
        return begun

    def last(self, rank: int, record: Record) -> int:
        """Returns the rank that `rank` waited for last in this record; -1 for none.

        If hosts have several ranks, a rank notices only some ranks of other hosts, and those may be
        waiting for ranks of their own host. Therefore the result is the rank that began last,
        unless the clocks are too inaccurate to identify it.
        """
        begun = {} if record.is_message else self._begun[record.sequence]
        if record.kind == "broadcast" or record.last not in begun:
            return record.last
        latest = max(begun, key=begun.__getitem__)
        if latest == rank:  # It waited for earlier work of the noticed rank.
            return record.last
        uncertainty = uncertainty_ns(self.members[latest].clock, self.members[record.last].clock)
        return latest if begun[latest] - begun[record.last] > uncertainty else record.last

    def joined(self, rank: int) -> int | None:
        """Returns the number of the last collective that the rank certainly joined, or None."""
        known = [peer.sequence for _, peer in self.heard[rank]]
        own = self.members[rank].joined if rank in self.members else None
        return max(known if own is None else [*known, own], default=None)

    def log(self, rank: int) -> Log | None:
        """Returns the log of a rank's worker, if it exists."""
        owner = self.members.get(rank) or self.outside.get(rank)
        return owner.log if owner is not None else None

    def host(self, rank: int) -> str:
        """The name of a rank's host, from the log of any rank of the host; "" if unknown."""
        own = self.log(rank)
        hosts = (m.log.host for m in self.members.values() if m.is_on_host_of(rank))
        return own.host if own is not None else next(hosts, "")

    def heard_last(self, rank: int) -> tuple[Member, Peer] | None:
        """Returns the latest information about the rank, and the member that has it."""
        heard = ((by, peer) for by, peer in self.heard[rank] if peer.heard_ns)
        return max(heard, key=lambda pair: pair[0].time(pair[1].heard_ns), default=None)


@dataclass(frozen=True)
class Job:
    """The merged logs.

    Attributes:
        workers: the workers with a log, by rank.
        groups: the communicators, in the order of their appearance in the logs.
    """

    workers: tuple[Worker, ...]
    groups: tuple[Group, ...]

    @property
    def size(self) -> int:
        """The number of workers, with and without a log."""
        return max((worker.log.size for worker in self.workers), default=0)

    def without_log(self) -> tuple[str, ...]:
        """The names of workers without a log; "rank n" if no log shows the name."""
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


@dataclass(frozen=True)
class Total:
    """Seconds of waiting over the recorded collectives and messages of a worker.

    Attributes:
        worker: its name.
        waited_for: the total wait of the other workers in operations that this worker joined last.
        waited: its own wait, regardless of the worker that joined last.
    """

    worker: str
    waited_for: float
    waited: float


def add_up(job: Job) -> tuple[Total, ...]:
    """Adds up the waits of each worker.

    A wait begins when the worker begins an operation, and ends when it notices the last rank.

    Returns:
        The totals of the workers that waited or that others waited for. The worker that others
        waited for longest is first.
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
