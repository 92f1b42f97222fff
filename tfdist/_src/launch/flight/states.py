"""What each worker did last."""

from __future__ import annotations

from tfdist._src.launch.flight.findings import Last, Operation, State, Written
from tfdist._src.launch.flight.log import Record
from tfdist._src.launch.flight.merge import Job, Member, Worker
from tfdist._src.launch.flight.stacks import user_frames


def last(member: Member, record: Record) -> Last:
    """A record as seen at the end of its log."""
    state = "failed" if record.failed else "ended" if record.ended_ns else "waiting"
    time = record.ended_ns or record.begun_ns
    operation = Operation(record.what, member.communicator.name, record.sequence)
    return Last(operation, state, member.time(time) / 1e9, (member.log.steady_ns - time) / 1e9)


def states(job: Job) -> tuple[State, ...]:
    """The state of each worker whose log is there, by rank."""
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
        clock="compared" if worker.clock.island == first.clock.island else "unix",
        reasons=tuple(
            Written(r.kind, r.communicator, r.message, worker.time(r.steady_ns) / 1e9)
            for r in log.reasons
        ),
        last=_last(worker),
        input_seconds=log.input_seconds,
        frames=user_frames(log.stacks, log.program),
    )


def _last(worker: Worker) -> tuple[Last, ...]:
    current = [last(m, m.current) for m in worker.members if m.current is not None]
    if current:
        return tuple(current)
    ended = [last(m, m.communicator.records[-1]) for m in worker.members if m.communicator.records]
    return tuple(sorted(ended, key=lambda one: -one.time)[:1])
