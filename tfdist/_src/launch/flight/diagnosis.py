"""From merged logs to findings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from tfdist._src.launch.flight.backlogs import Backlog, longest
from tfdist._src.launch.flight.cycles import Edge, find_cycles
from tfdist._src.launch.flight.findings import (
    Absence,
    Absent,
    Diagnosis,
    Failure,
    Finding,
    Heard,
    Link,
    Operation,
    Silent,
    Transfer,
    Unclear,
)
from tfdist._src.launch.flight.merge import Group, Job
from tfdist._src.launch.flight.mismatches import find_mismatch
from tfdist._src.launch.flight.stacks import user_frames
from tfdist._src.launch.flight.states import last, states
from tfdist._src.launch.flight.step_communication import communicated
from tfdist._src.launch.flight.totals import add_up
from tfdist._src.launch.flight.waiting import Wait, find_waits

# The core adds to a cause where each rank noticed it.
_NOTICED = " It was noticed in "


def diagnose(job: Job) -> Diagnosis:
    """Explains why a job stopped or hangs.

    Causes come before what follows from them: differing calls, cycles of waits, errors, waits for
    workers that wait for nobody, other waits.
    """
    mismatches = {group: found for group in job.groups if (found := find_mismatch(group))}
    waits = [wait for group in job.groups for wait in find_waits(group)]
    edges = [edge for wait in waits for edge in _edges(wait)]
    links: dict[str, list[Link]] = defaultdict(list)
    for edge in edges:
        links[edge.link.worker].append(edge.link)
    absences = [_absence(wait, links) for wait in waits if wait.absent]
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
            # Devices of one worker can be ranks of a group.
            if record is not None and wait.group.ranks[rank] != member.name:
                operation = Operation(record.what, wait.group.name, record.sequence)
                link = Link(member.name, operation, wait.group.ranks[rank])
                since = member.time(record.begun_ns)
                found.append(Edge(link, since, wait.since + nanoseconds))
    return found


def _absence(wait: Wait, links: Mapping[str, Sequence[Link]]) -> Absence:
    group = wait.group
    absent = [_absent(wait, rank, links.get(group.ranks[rank], ())) for rank in sorted(wait.absent)]
    return Absence(
        operation=_operation(wait),
        waiting=_waiting(wait),
        is_message=wait.record.is_message,
        all_others=len(wait.waiting) + len(absent) == len(group.ranks),
        time=wait.since / 1e9,
        seconds=max(wait.absent.values()) / 1e9,
        absent=tuple(sorted(absent, key=lambda one: bool(one.waits))),
    )


def _absent(wait: Wait, rank: int, links: Sequence[Link]) -> Absent:
    group, member, log = wait.group, wait.group.members.get(rank), wait.group.log(rank)
    record = None
    if member is not None:
        records = [
            own
            for own in member.communicator.records
            if wait.record.is_message or not own.is_message
        ]
        record = records[-1] if records else None
    return Absent(
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


def _heard(group: Group, rank: int) -> Heard | None:
    heard = group.heard_last(rank)
    if heard is None:
        return None
    by, peer = heard
    peers = [other for _, other in group.heard[rank]]
    return Heard(
        by=by.name,
        time=by.time(peer.heard_ns) / 1e9,
        number=peer.sequence,
        inside=peer.inside,
        left=any(other.left for other in peers),
        lost=any(other.lost for other in peers),
    )


def _failures(job: Job) -> list[Failure]:
    """The errors that ended communicators, the first one first."""
    workers: dict[str, dict[str, None]] = defaultdict(dict)
    communicators: dict[str, dict[str, None]] = defaultdict(dict)
    times: dict[str, int] = {}
    for worker in job.workers:
        for reason in worker.log.reasons:
            if reason.kind == "error":
                cause, time = _cause(reason.message), worker.time(reason.steady_ns)
                times[cause] = min(time, times.get(cause, time))
                workers[cause][worker.log.worker] = None
                if reason.communicator:
                    communicators[cause][reason.communicator] = None
        for member in worker.members:
            if member.communicator.aborted is not None:
                cause = _cause(member.communicator.aborted)
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


def _cause(message: str) -> str:
    return message.partition(_NOTICED)[0]


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
            Silent(worker, _heard(group, rank))
            for rank, worker in enumerate(group.ranks)
            if group.log(rank) is None
        ),
    )


def _backlogs(group: Group, seconds: float) -> Iterator[Backlog]:
    """What the members had sent and was not acknowledged, in an operation of so many seconds."""
    for member in group.members.values():
        for one in member.communicator.connections:
            if one.pending_bytes > 0:
                yield Backlog(
                    sender=member.name,
                    receiver=group.ranks[one.rank],
                    bytes=one.pending_bytes,
                    bytes_per_second=one.bytes_per_second,
                    silent_seconds=min(seconds, one.silent_ms / 1e3),
                )


def _unclear(wait: Wait) -> Unclear:
    return Unclear(
        operation=_operation(wait),
        waiting=_waiting(wait),
        workers=tuple(wait.group.ranks[rank] for rank in wait.unclear),
        time=wait.since / 1e9,
        seconds=(wait.until - wait.since) / 1e9,
    )
