"""Finds out from the merged flight logs of a job why the job failed or hangs."""

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
    """Returns the innermost calls of user code in the main thread.

    Args:
        stacks: the stacks of all threads, as faulthandler prints them.
        program: the file name of the script. The script's frames count as user code even if the
            script is in the folder of a library.

    Returns:
        Up to three calls, innermost first, such as `"load (/app/data.py:12)"`. If the main thread
        has no frames of user code, its innermost calls in libraries are returned instead.
    """
    threads = [_FRAME.findall(text) for text in _THREAD.split(stacks)[1:]]
    # The main thread is the thread that runs the script. faulthandler prints it last.
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
    """Returns a recorded operation, with its state at the time when the log was written."""
    state = "failed" if record.failed else "ended" if record.ended_ns else "waiting"
    time = record.ended_ns or record.begun_ns
    operation = Operation(record.what, member.communicator.name, record.sequence)
    return LastOperation(
        operation, state, member.time(time) / 1e9, (member.log.steady_ns - time) / 1e9
    )


def states(job: Job) -> tuple[State, ...]:
    """Returns the state of each worker that has a log, in rank order."""
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


# If members have been in an operation for less than this time, it may still be making progress.
_LONG_NS = 1_000_000_000
_OTHER_SIDE = {"send": "receive", "receive": "send"}


@dataclass(frozen=True)
class Wait:
    """An operation that has failed, or that some members have joined but not completed.

    The times `since` and `until` are in nanoseconds of shared time (see `Clock`).

    Attributes:
        group: the group that the operation belongs to.
        record: the operation's record in the log of the member that began first.
        waiting: the members that had joined the operation.
        absent: maps each rank that had not joined the operation to a number of nanoseconds: the
            logs show that the rank had not joined this long after `since`.
        late: the ranks in `absent` that joined after the operation had failed on another rank.
        unclear: the ranks for which the logs do not show whether they had joined the operation.
        since: when the first member began the operation.
        until: the latest time at which a member was in the operation. This is when the operation
            failed on the member, or when the member's log was written.
        has_failed: whether the operation has failed on any member.
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
    """Finds operations that have failed, or in which members have waited for at least 1 second."""
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
    """Returns the ranks that began a collective after it had failed on another rank."""
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
    """Returns the latest time at which the logs show what a rank was doing, in shared time.

    The caller has found that the rank had not joined a collective by then.

    Args:
        group: the group of the collective.
        rank: the rank that had not joined.
        first: the member that began the collective first. The error of its clock also counts.

    Returns:
        Two times: an earlier time that is certain even if the clocks have their maximum errors, and
        the probable time. Both are 0 if no log contains information about the rank.
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
    """A worker's wait for another worker, with its start and end in nanoseconds of shared time."""

    link: Link
    since: int
    until: int


def find_cycles(edges: Sequence[Edge]) -> list[Cycle]:
    """Finds workers that wait for one another in a cycle.

    No worker is in two of the returned cycles: of several cycles with a common worker, only one is
    found. A cycle is left out if its waits do not overlap in time. Then the logs of its workers
    were written at different times, and the workers may never have been waiting together.
    """
    into: dict[str, list[str]] = defaultdict(list)
    ways: dict[str, int] = defaultdict(int)
    for edge in edges:
        into[edge.link.waits_for].append(edge.link.worker)
        ways[edge.link.worker] += 1
    # Repeatedly remove the workers that do not wait for a remaining worker. Each worker that then
    # remains is in a cycle, or waits for a worker in a cycle, directly or through other workers.
    free = [worker for worker in into if not ways[worker]]
    for worker in free:  # The loop also visits the workers that it appends.
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


# Maps each attribute of `Record` that must be equal on all ranks to its name in messages.
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
    """Finds the first collective that ranks called differently, if there is one.

    The search ignores a log that was written before the last rank began the collective. Such a log
    may be a remainder of an earlier run, in which another collective had the same number.
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
    """Returns the calls from logs that were written after the last of the calls had begun."""
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
    # The sort is stable: of several groups of equal size, the group with the lowest rank is first.
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
    """Explains why a job failed or hangs.

    In the result, causes precede their consequences. The order is: collectives that workers called
    differently, cycles of waits, errors, waits for workers that do not wait themselves, waits for
    workers that wait themselves, slow or stuck transfers, and operations with unknown participants.
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
            # Several ranks of a group can belong to devices of the same worker. A worker does not
            # wait for itself.
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
    """Returns the errors that ended communicators; the error that was reported first is first."""
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
    """Yields the data that members have sent and that the receivers have not acknowledged.

    Args:
        group: the group of the members.
        seconds: how long the current operation has lasted. A receiver is not reported as silent for
            longer than this.
    """
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
