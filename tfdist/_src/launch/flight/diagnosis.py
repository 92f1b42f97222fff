"""Derives findings from merged logs."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from tfdist._src.launch.flight.findings import (
    Call,
    Cycle,
    Diagnosis,
    Failure,
    Finding,
    LastOperation,
    LastReport,
    Link,
    LogReason,
    Mismatch,
    MissingWorker,
    MissingWorkers,
    Operation,
    State,
    Transfer,
    UnacknowledgedData,
    UnknownParticipants,
    WorkerWithoutLog,
    longest,
)
from tfdist._src.launch.flight.log import Record
from tfdist._src.launch.flight.merge import Group, Job, Member, Worker, add_up, uncertainty_ns
from tfdist._src.launch.flight.step_communication import communicated

_THREAD = re.compile(r"^(?:Current t|T)hread \S+.*$", re.MULTILINE)
_FRAME = re.compile(r'^ +File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_LIBRARY = re.compile(r"/(?:site-packages|dist-packages|lib(?:64)?/python3\.\d+)/|^<frozen ")
_OWN = f"{Path(__file__).parents[3]}/"
_MAX_FRAMES = 3


def user_frames(stacks: str, program: str) -> tuple[str, ...]:
    """Returns the innermost calls of the main thread outside libraries.

    Args:
        stacks: the stacks of all threads, as faulthandler prints them.
        program: the name of the script; its frames count as user code in any folder.

    Returns:
        Up to three calls, innermost first, such as `"load (/app/data.py:12)"`. If the thread has
        frames of libraries only, its innermost calls.
    """
    threads = [_FRAME.findall(text) for text in _THREAD.split(stacks)[1:]]
    # The main thread runs the script, and Python prints it last.
    last = threads[-1] if threads else []
    main = next((frames for frames in reversed(threads) if _runs_script(frames)), last)
    own = [frame for frame in main if Path(frame[0]).name == program or not _is_library(frame[0])]
    return tuple(
        f"{function} ({file}:{line})" for file, line, function in (own or main)[:_MAX_FRAMES]
    )


def _runs_script(frames: list[tuple[str, str, str]]) -> bool:
    return any(function == "<module>" for _, _, function in frames)


def _is_library(file: str) -> bool:
    return bool(_LIBRARY.search(file)) or file.startswith(_OWN)


def last(member: Member, record: Record) -> LastOperation:
    """Describes a recorded operation in its state at the end of the log."""
    state = "failed" if record.failed else "ended" if record.ended_ns else "waiting"
    time = record.ended_ns or record.begun_ns
    operation = Operation(record.what, member.communicator.name, record.sequence)
    return LastOperation(
        operation, state, member.time(time) / 1e9, (member.log.steady_ns - time) / 1e9
    )


def states(job: Job) -> tuple[State, ...]:
    """Returns the state of each worker that has a log, by rank."""
    return tuple(_state(worker, job.workers[0]) for worker in job.workers)


def _state(worker: Worker, first: Worker) -> State:
    log = worker.log
    return State(
        worker=log.worker,
        rank=log.rank,
        host=log.host,
        pid=log.pid,
        program=log.program,
        steps=log.steps,
        written=worker.written / 1e9,
        clock="compared" if worker.clock.clock_group == first.clock.clock_group else "unix",
        reasons=tuple(
            LogReason(r.kind, r.communicator, r.message, worker.time(r.steady_ns) / 1e9)
            for r in log.reasons
        ),
        last=_last(worker),
        input_seconds=log.input_seconds,
        frames=user_frames(log.stacks, log.program),
    )


def _last(worker: Worker) -> tuple[LastOperation, ...]:
    current = [last(m, m.current) for m in worker.members if m.current is not None]
    if current:
        return tuple(current)
    ended = [last(m, m.communicator.records[-1]) for m in worker.members if m.communicator.records]
    return tuple(sorted(ended, key=lambda one: -one.time)[:1])


# A shorter operation may still be making progress, unless it has failed.
_LONG_NS = 1_000_000_000
_OTHER_SIDE = {"send": "receive", "receive": "send"}


@dataclass(frozen=True)
class Wait:
    """An operation that has failed, or that members have joined but not completed.

    Attributes:
        group: the group that the operation belongs to.
        record: the record of the member that began first.
        waiting: the members that had joined.
        absent: the ranks that had not joined, each with the number of nanoseconds after `since` for
            which the logs show its absence.
        late: the absent ranks that joined after the operation had failed on another rank.
        unclear: the ranks that may or may not have joined, since the logs do not show it.
        since: when the first member began, in shared time.
        until: when the last member failed, or its log was written.
        has_failed: whether it failed on any member.
    """

    group: Group
    record: Record
    waiting: tuple[Member, ...]
    absent: dict[int, int]
    late: frozenset[int]
    unclear: tuple[int, ...]
    since: int
    until: int
    has_failed: bool


def find_waits(group: Group) -> Iterator[Wait]:
    """Finds failed operations, and operations that members have waited in for at least 1 s."""
    inside: dict[int, list[tuple[Member, Record]]] = defaultdict(list)
    for member in group.members.values():
        record = member.current
        if record is not None and record.is_message:
            yield from _message(group, member, record)
        elif record is not None:
            inside[record.sequence].append((member, record))
    for sequence in sorted(inside):
        yield from _collective(group, inside[sequence])


def _collective(group: Group, inside: list[tuple[Member, Record]]) -> Iterator[Wait]:
    late = _late(inside)
    inside = [pair for pair in inside if pair[0].communicator.rank not in late]
    first, record = min(inside, key=lambda pair: pair[0].time(pair[1].begun_ns))
    since = first.time(record.begun_ns)
    until = max(member.until(own) for member, own in inside)
    has_failed = any(own.failed for _, own in inside)
    absent = dict.fromkeys(late, until - since)
    unclear = []
    for rank in set(range(len(group.ranks))) - late:
        joined = group.joined(rank)
        if joined is not None and joined >= record.sequence:
            continue
        if group.log(rank) is None:
            absent[rank] = until - since
            continue
        surely, seen = _seen_outside(group, rank, first)
        if surely - since < (1 if has_failed else _LONG_NS):
            unclear.append(rank)
        else:
            absent[rank] = min(until, seen) - since
    if record.kind == "broadcast" and record.root in absent:
        absent = {record.root: absent[record.root]}
    if has_failed or until - since >= _LONG_NS:
        members = tuple(member for member, _ in inside)
        yield Wait(group, record, members, absent, late, tuple(unclear), since, until, has_failed)


def _late(inside: list[tuple[Member, Record]]) -> frozenset[int]:
    """Returns the ranks that began a collective after it had failed elsewhere."""
    failed = [(member, record) for member, record in inside if record.failed]
    if not failed:
        return frozenset()
    first, end = min(failed, key=lambda pair: pair[0].time(pair[1].ended_ns))
    return frozenset(
        member.communicator.rank
        for member, record in inside
        if member.time(record.begun_ns) - uncertainty_ns(member.clock, first.clock)
        > first.time(end.ended_ns)
    )


def _seen_outside(group: Group, rank: int, first: Member) -> tuple[int, int]:
    """Returns the latest time at which a rank had not joined the operation of `first`.

    Returns:
        The time that is certain despite the error of the clocks, and the probable time; zeros if
        unknown.
    """
    seen = [(by.time(peer.heard_ns), by.clock) for by, peer in group.heard[rank] if peer.heard_ns]
    if rank in group.outside:
        seen.append((group.outside[rank].written, group.outside[rank].clock))
    elif group.members[rank].joined is not None:
        seen.append((group.members[rank].written, group.members[rank].clock))
    return max(
        ((at - uncertainty_ns(clock, first.clock), at) for at, clock in seen), default=(0, 0)
    )


def _message(group: Group, member: Member, record: Record) -> Iterator[Wait]:
    since, until = member.time(record.begun_ns), member.until(record)
    if not record.failed and until - since < _LONG_NS:
        return
    absent: dict[int, int] = {}
    unclear: tuple[int, ...] = ()
    other = group.members.get(record.peer) or group.outside.get(record.peer)
    if other is None:
        absent = {record.peer: until - since}
    else:
        records = other.communicator.records if isinstance(other, Member) else ()
        begun = [
            own.sequence
            for own in records
            if own.kind == _OTHER_SIDE[record.kind] and own.peer == member.communicator.rank
        ]
        is_wrapped = bool(records) and records[0].number > 1
        surely = other.written - uncertainty_ns(other.clock, member.clock)
        if max(begun, default=0) >= record.sequence:
            pass
        elif (is_wrapped and not begun) or surely - since < (1 if record.failed else _LONG_NS):
            unclear = (record.peer,)
        else:
            absent = {record.peer: min(until, other.written) - since}
    yield Wait(group, record, (member,), absent, frozenset(), unclear, since, until, record.failed)


@dataclass(frozen=True)
class Edge:
    """A wait of one worker for another, with its bounds in nanoseconds of shared time."""

    link: Link
    since: int
    until: int


def find_cycles(edges: Sequence[Edge]) -> list[Cycle]:
    """Finds cycles of waits that share no worker: at least one cycle if any exists.

    Ignores a cycle if its waits do not overlap, because then its logs were written at different
    times.
    """
    into: dict[str, list[str]] = defaultdict(list)
    ways: dict[str, int] = defaultdict(int)
    for edge in edges:
        into[edge.link.waits_for].append(edge.link.worker)
        ways[edge.link.worker] += 1
    # Remove workers that wait for no other worker, repeatedly. The remaining workers are on a cycle
    # or lead to a cycle.
    free = [worker for worker in into if not ways[worker]]
    for worker in free:  # The loop extends the list.
        for waiting in into[worker]:
            ways[waiting] -= 1
            if not ways[waiting]:
                free.append(waiting)
    taken = set(free)
    following = {e.link.worker: e for e in reversed(edges) if e.link.waits_for not in taken}
    return [cycle for cycle in _walk(following) if cycle is not None]


def _walk(following: dict[str, Edge]) -> list[Cycle | None]:
    found = []
    visited: set[str] = set()
    for start in sorted(following):
        path: dict[str, Edge] = {}
        worker = start
        while worker not in visited:
            visited.add(worker)
            path[worker] = following[worker]
            worker = following[worker].link.waits_for
        if worker in path:
            found.append(_cycle(list(path.values())[list(path).index(worker) :]))
    return found


def _cycle(edges: list[Edge]) -> Cycle | None:
    together = max(edge.since for edge in edges) < min(edge.until for edge in edges)
    return Cycle(tuple(edge.link for edge in edges)) if together else None


# The attributes of a record that must be equal on all ranks, with their names in messages.
_AGREED = {
    "kind": "the kind",
    "name": "the name",
    "type": "the type",
    "shapes": "the shapes",
    "tensors": "the number of tensors",
    "elements": "the number of elements",
    "op": "the reduction",
    "root": "the root",
    "codec": "the compression",
    "forced_algorithm": "the algorithm (TFDIST_ALGORITHM)",
    "failures": "the number of failed steps",
}
_key = attrgetter(*_AGREED)


def find_mismatch(group: Group) -> Mismatch | None:
    """Finds the first collective in which the ranks' calls differ, if any.

    Ignores a log that was written before the last rank began the collective, because the log may be
    from an earlier run, which numbered its collectives in the same way.
    """
    first: dict[int, tuple[object, ...]] = {}
    differing = set()
    for _, record in _collectives(group):
        key = _key(record)
        if first.setdefault(record.sequence, key) != key:
            differing.add(record.sequence)
    found: dict[int, list[tuple[Member, Record]]] = defaultdict(list)
    for member, record in _collectives(group):
        if record.sequence in differing:
            found[record.sequence].append((member, record))
    for sequence in sorted(differing):
        current = _current(found[sequence])
        if len({_key(record) for _, record in current}) > 1:
            return _describe(group.name, sequence, current)
    return None


def _collectives(group: Group) -> Iterator[tuple[Member, Record]]:
    for _, member in sorted(group.members.items()):
        for record in member.communicator.records:
            if not record.is_message:
                yield member, record


def _current(calls: list[tuple[Member, Record]]) -> list[tuple[Member, Record]]:
    """Returns the calls whose logs were written after the last call began."""
    last, record = max(calls, key=lambda call: call[0].time(call[1].begun_ns))
    begun = last.time(record.begun_ns)
    return [
        (member, own)
        for member, own in calls
        if member.written + uncertainty_ns(member.clock, last.clock) >= begun
    ]


def _describe(name: str, sequence: int, calls: list[tuple[Member, Record]]) -> Mismatch:
    made: dict[tuple[object, ...], list[tuple[Member, Record]]] = defaultdict(list)
    for member, record in calls:
        made[_key(record)].append((member, record))
    # Sorting is stable: among sets of the same size, the set with the lowest rank is first.
    most_first = sorted(made.values(), key=lambda same: -len(same))
    columns = zip(_AGREED.values(), zip(*made, strict=True), strict=True)
    return Mismatch(
        communicator=name,
        number=sequence,
        calls=tuple(
            Call(tuple(member.name for member, _ in same), same[0][1].what) for same in most_first
        ),
        differs=tuple(title for title, values in columns if len(set(values)) > 1),
        time=min(member.time(record.begun_ns) for member, record in calls) / 1e9,
    )


def diagnose(job: Job) -> Diagnosis:
    """Explains why a job stopped or hangs.

    Causes precede their consequences: differing calls, cycles of waits, errors, waits for workers
    that do not wait themselves, other waits.
    """
    mismatches = {group: found for group in job.groups if (found := find_mismatch(group))}
    waits = [wait for group in job.groups for wait in find_waits(group)]
    edges = [edge for wait in waits for edge in _edges(wait)]
    links: dict[str, list[Link]] = defaultdict(list)
    for edge in edges:
        links[edge.link.worker].append(edge.link)
    absences = [_missing_workers(wait, links) for wait in waits if wait.absent]
    findings: list[Finding] = [
        *sorted(mismatches.values(), key=lambda mismatch: mismatch.time),
        *find_cycles(edges),
        *_failures(job),
        *sorted(absences, key=lambda absence: (bool(absence.absent[0].waits), absence.time)),
        *(_transfer(wait) for wait in waits if _all_joined(wait) and wait.group not in mismatches),
        *(_unclear(wait) for wait in waits if wait.unclear),
    ]
    return Diagnosis(
        job.size,
        job.without_log(),
        tuple(findings),
        add_up(job),
        communicated(job),
        states(job),
    )


def _operation(wait: Wait) -> Operation:
    return Operation(wait.record.what, wait.group.name, wait.record.sequence)


def _waiting(wait: Wait) -> tuple[str, ...]:
    members = sorted(wait.waiting, key=lambda member: member.communicator.rank)
    return tuple(member.name for member in members)


def _edges(wait: Wait) -> list[Edge]:
    found = []
    for member in wait.waiting:
        record = member.current
        for rank, nanoseconds in wait.absent.items():
            # Several ranks of a group can be devices of the same worker.
            if record is not None and wait.group.ranks[rank] != member.name:
                operation = Operation(record.what, wait.group.name, record.sequence)
                link = Link(member.name, operation, wait.group.ranks[rank])
                since = member.time(record.begun_ns)
                found.append(Edge(link, since, wait.since + nanoseconds))
    return found


def _missing_workers(wait: Wait, links: Mapping[str, Sequence[Link]]) -> MissingWorkers:
    group = wait.group
    absent = [
        _missing_worker(wait, rank, links.get(group.ranks[rank], ()))
        for rank in sorted(wait.absent)
    ]
    return MissingWorkers(
        operation=_operation(wait),
        waiting=_waiting(wait),
        is_message=wait.record.is_message,
        all_others=len(wait.waiting) + len(absent) == len(group.ranks),
        time=wait.since / 1e9,
        seconds=max(wait.absent.values()) / 1e9,
        absent=tuple(sorted(absent, key=lambda one: bool(one.waits))),
    )


def _missing_worker(wait: Wait, rank: int, links: Sequence[Link]) -> MissingWorker:
    group, member, log = wait.group, wait.group.members.get(rank), wait.group.log(rank)
    record = None
    if member is not None:
        records = [
            own
            for own in member.communicator.records
            if wait.record.is_message or not own.is_message
        ]
        record = records[-1] if records else None
    return MissingWorker(
        worker=group.ranks[rank],
        host=group.host(rank),
        seconds=wait.absent[rank] / 1e9,
        has_log=log is not None,
        has_communicator=member is not None,
        late=rank in wait.late,
        last=last(member, record) if member is not None and record is not None else None,
        input_seconds=log.input_seconds if log is not None else None,
        frames=user_frames(log.stacks, log.program) if log is not None else (),
        waits=tuple(links),
        heard=_heard(group, rank),
    )


def _heard(group: Group, rank: int) -> LastReport | None:
    heard = group.heard_last(rank)
    if heard is None:
        return None
    by, peer = heard
    peers = [other for _, other in group.heard[rank]]
    return LastReport(
        by=by.name,
        time=by.time(peer.heard_ns) / 1e9,
        number=peer.sequence,
        inside=peer.inside,
        left=any(other.left for other in peers),
        lost=any(other.lost for other in peers),
    )


def _failures(job: Job) -> list[Failure]:
    """Returns the errors that ended communicators, earliest first."""
    workers: dict[str, dict[str, None]] = defaultdict(dict)
    communicators: dict[str, dict[str, None]] = defaultdict(dict)
    times: dict[str, int] = {}
    for worker in job.workers:
        for reason in worker.log.reasons:
            if reason.kind == "error":
                cause, time = reason.message, worker.time(reason.steady_ns)
                times[cause] = min(time, times.get(cause, time))
                workers[cause][worker.log.worker] = None
                if reason.communicator:
                    communicators[cause][reason.communicator] = None
        for member in worker.members:
            if member.communicator.aborted is not None:
                cause = member.communicator.aborted.message
                workers[cause][worker.log.worker] = None
                communicators[cause][member.communicator.name] = None
    failures = [
        Failure(
            message=cause,
            workers=tuple(workers[cause]),
            communicators=tuple(communicators[cause]),
            time=times[cause] / 1e9 if cause in times else None,
        )
        for cause in workers
    ]
    return sorted(failures, key=lambda failure: (failure.time is None, failure.time or 0.0))


def _all_joined(wait: Wait) -> bool:
    return not (wait.absent or wait.unclear or wait.has_failed)


def _transfer(wait: Wait) -> Transfer:
    group, seconds = wait.group, (wait.until - wait.since) / 1e9
    return Transfer(
        operation=_operation(wait),
        waiting=_waiting(wait),
        time=wait.since / 1e9,
        seconds=seconds,
        backlogs=longest(_backlogs(group, seconds)),
        silent=tuple(
            WorkerWithoutLog(worker, _heard(group, rank))
            for rank, worker in enumerate(group.ranks)
            if group.log(rank) is None
        ),
    )


def _backlogs(group: Group, seconds: float) -> Iterator[UnacknowledgedData]:
    """Yields the members' unacknowledged data in an operation that has lasted `seconds`."""
    for member in group.members.values():
        for one in member.communicator.connections:
            if one.pending_bytes > 0:
                yield UnacknowledgedData(
                    sender=member.name,
                    receiver=group.ranks[one.rank],
                    bytes=one.pending_bytes,
                    bytes_per_second=one.bytes_per_second,
                    silent_seconds=min(seconds, one.silent_ms / 1e3),
                )


def _unclear(wait: Wait) -> UnknownParticipants:
    return UnknownParticipants(
        operation=_operation(wait),
        waiting=_waiting(wait),
        workers=tuple(wait.group.ranks[rank] for rank in wait.unclear),
        time=wait.since / 1e9,
        seconds=(wait.until - wait.since) / 1e9,
    )
