"""The findings as data; `tfdist doctor --flight --json` prints these fields.

Times are Unix times in seconds, by the clock of one host; workers are named as in messages.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TypeAlias

from tfdist._src.launch.flight.merge import Total

_WORKER = re.compile(r"(\w+) (\d+) \(.*\)")
_MAX_LISTED = 8


def workers(names: Sequence[str]) -> str:
    """Formats the names of workers; a single worker keeps its address.

    Example:
        >>> workers(["worker 0 (a:1)", "worker 2 (c:1)", "worker 3 (d:1)", "worker 4 (e:1)"])
        'workers 0 and 2 to 4'
    """
    found = [_WORKER.fullmatch(name) for name in names]
    if len(names) == 1 or not all(found):
        return listed(names)
    by_job: dict[str, list[int]] = {}
    for match in found:
        if match is not None:
            by_job.setdefault(match[1], []).append(int(match[2]))
    jobs = (f"{job}{'s' * (len(i) > 1)} {listed(_runs(i))}" for job, i in by_job.items())
    return " and ".join(jobs)


def listed(parts: Sequence[str]) -> str:
    """Joins parts with commas and "and"; shortens long lists to the first ones and a count.

    Example:
        >>> listed(["a", "b", "c"])
        'a, b and c'
    """
    shown = list(parts)
    if len(shown) > _MAX_LISTED:
        shown[_MAX_LISTED - 1 :] = [f"{len(shown) - _MAX_LISTED + 1} more"]
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))


def _runs(numbers: Sequence[int]) -> list[str]:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = []
    for run in runs:
        texts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(number) for number in run]
    return texts


def seconds(value: float) -> str:
    """Formats a duration, as in "12.3 s", with more digits below a second.

    Example:
        >>> seconds(12.345), seconds(0.0123)
        ('12.3 s', '0.012 s')
    """
    return f"{value:.1f} s" if value >= 1 else f"{value:.3f} s"


def moment(unix: float) -> str:
    """Formats a time of day.

    Example:
        >>> moment(1700000000.0)
        '22:13:20 UTC'
    """
    return _datetime(unix).strftime("%H:%M:%S UTC")


def date(unix: float) -> str:
    """Formats a date.

    Example:
        >>> date(1700000000.0)
        '2023-11-14'
    """
    return _datetime(unix).strftime("%Y-%m-%d")


def _datetime(unix: float) -> datetime:
    return datetime.fromtimestamp(unix, timezone.utc)


# Backlogs below this share of the longest are probably just in transit.
_WORTH_NAMING = 0.1
_SILENT_SECONDS = 1.0


@dataclass(frozen=True)
class UnacknowledgedData:
    """Data that a worker has sent and its receiver has not acknowledged.

    Attributes:
        sender: the sending worker.
        receiver: the receiving worker.
        bytes: the number of bytes.
        bytes_per_second: the recent rate of arrival at the receiver; 0 if unknown.
        silent_seconds: the time since data last arrived at the receiver.
    """

    sender: str
    receiver: str
    bytes: int
    bytes_per_second: float
    silent_seconds: float

    @property
    def seconds(self) -> float:
        """The estimated time to deliver the data."""
        rest = self.bytes / self.bytes_per_second if self.bytes_per_second else 0.0
        return max(rest, self.silent_seconds)


def longest(found: Iterable[UnacknowledgedData]) -> tuple[UnacknowledgedData, ...]:
    """Returns the backlogs of at least a tenth of the longest delay, longest first."""
    ordered = sorted(found, key=lambda one: -one.seconds)
    return tuple(one for one in ordered if one.seconds >= _WORTH_NAMING * ordered[0].seconds)


def describe_backlogs(found: Sequence[UnacknowledgedData]) -> str:
    """Describes the data in transit, its senders and receivers, and where to look.

    Example:
        >>> describe_backlogs([UnacknowledgedData("worker 2 (c:1)", "worker 0 (a:1)", 400_000, 120e3, 0.0)])
        'Data is on its way from worker 2 (c:1) to worker 0 (a:1): 0.4 MB, at 0.12 MB/s. Look at the network between them.'
    """  # noqa: E501
    senders, receivers = _ends(found)
    if len(senders) > 1 and len(receivers) > 1:
        pairs = [f"from {one.sender} to {one.receiver}" for one in found]
        return f"Data is on its way {listed(pairs)}: {_amount(found)}. Look at the network."
    between = f"Data is on its way from {workers(senders)} to {workers(receivers)}"
    where = "between them"
    if len(found) > 1:
        where = f"of {(senders if len(senders) == 1 else receivers)[0]}"
    return f"{between}: {_amount(found)}. Look at the network {where}."


def _ends(found: Sequence[UnacknowledgedData]) -> tuple[list[str], list[str]]:
    """Returns the senders and the receivers, each once."""
    senders = dict.fromkeys(one.sender for one in found)
    receivers = dict.fromkeys(one.receiver for one in found)
    return list(senders), list(receivers)


def _amount(found: Sequence[UnacknowledgedData]) -> str:
    amount = f"{sum(one.bytes for one in found) / 1e6:.2g} MB"
    silent = min(one.silent_seconds for one in found)
    if silent >= _SILENT_SECONDS:
        return f"{amount}, and nothing has arrived for {seconds(silent)}"
    rate = sum(one.bytes_per_second for one in found)
    return f"{amount}, at {rate / 1e6:.2g} MB/s" if rate else amount


@dataclass(frozen=True)
class Operation:
    """A collective or a message.

    Attributes:
        what: its kind, name, type and shape.
        communicator: the name of the communicator.
        number: the number of a collective in its group, or of a message between the two ranks.
    """

    what: str
    communicator: str
    number: int


@dataclass(frozen=True)
class Call:
    """A call, and the workers that made it."""

    workers: tuple[str, ...]
    what: str


@dataclass(frozen=True)
class Link:
    """A worker that waits for another one in an operation."""

    worker: str
    operation: Operation
    waits_for: str


@dataclass(frozen=True)
class LastOperation:
    """The last operation of a worker.

    Attributes:
        operation: the collective or message.
        state: "waiting", "failed" or "ended".
        time: when it began if the worker waits in it, else when it ended.
        seconds: the seconds from `time` until the log was written.
    """

    operation: Operation
    state: str
    time: float
    seconds: float


@dataclass(frozen=True)
class LastReport:
    """The last report about a worker that another worker received.

    Attributes:
        by: the other worker.
        time: the time of the report.
        number: the last collective of the group that the worker had joined.
        inside: the operation that the worker was in, if any.
        left: whether the worker had left the group.
        lost: whether the worker counted as lost.
    """

    by: str
    time: float
    number: int
    inside: str | None
    left: bool
    lost: bool


@dataclass(frozen=True)
class MissingWorker:
    """A worker that others wait for.

    Attributes:
        worker: its name.
        host: its host's name; "" if unknown.
        seconds: the time that the others have waited, as far as the logs show.
        has_log: whether its log exists.
        has_communicator: whether its log shows the communicator.
        late: whether it joined after the others had given up.
        last: its last collective in the group, or last operation if others wait for a message.
        input_seconds: the time it had waited for its next batch; None if it did not wait.
        frames: the innermost calls of user code in its main thread.
        waits: its own waits for other workers.
        heard: the last report about it.
    """

    worker: str
    host: str
    seconds: float
    has_log: bool
    has_communicator: bool
    late: bool
    last: LastOperation | None
    input_seconds: float | None
    frames: tuple[str, ...]
    waits: tuple[Link, ...]
    heard: LastReport | None


@dataclass(frozen=True)
class Mismatch:
    """Workers called different collectives, for the first time in this communicator.

    Attributes:
        communicator: its name.
        number: the number of the collective.
        calls: the calls and their workers, most workers first.
        differs: the differing properties of the calls.
        time: when the first worker called it.
    """

    communicator: str
    number: int
    calls: tuple[Call, ...]
    differs: tuple[str, ...]
    time: float
    kind: str = field(default="mismatch", init=False)


@dataclass(frozen=True)
class Cycle:
    """Workers wait in a cycle: each for the next, the last for the first."""

    links: tuple[Link, ...]
    kind: str = field(default="cycle", init=False)


@dataclass(frozen=True)
class Failure:
    """An error that ended communicators.

    Attributes:
        message: its message.
        workers: the workers that report it.
        communicators: the names of the communicators that it ended.
        time: when it was first reported; None if unknown.
    """

    message: str
    workers: tuple[str, ...]
    communicators: tuple[str, ...]
    time: float | None
    kind: str = field(default="failure", init=False)


@dataclass(frozen=True)
class MissingWorkers:
    """Workers wait in an operation for others that have not joined it.

    Attributes:
        operation: the operation; for a message, the side of the waiting worker.
        waiting: the workers that wait.
        is_message: whether the operation is a message.
        all_others: whether each worker of the group either waits or is missing.
        time: the start of the wait.
        seconds: the duration of the wait.
        absent: the missing workers; workers that do not wait for others are first.
    """

    operation: Operation
    waiting: tuple[str, ...]
    is_message: bool
    all_others: bool
    time: float
    seconds: float
    absent: tuple[MissingWorker, ...]
    kind: str = field(default="absence", init=False)


@dataclass(frozen=True)
class WorkerWithoutLog:
    """A worker without a log.

    Attributes:
        worker: its name.
        heard: the last report about it that another worker received; None if no log has one.
    """

    worker: str
    heard: LastReport | None


@dataclass(frozen=True)
class Transfer:
    """All workers have joined an operation, but some do not complete it.

    Attributes:
        operation, waiting, time, seconds: see `MissingWorkers`.
        backlogs: the delayed data between hosts.
        silent: the members without a log, and the last reports about them. Such a member may have
            been stopped or killed in the middle of the operation.
    """

    operation: Operation
    waiting: tuple[str, ...]
    time: float
    seconds: float
    backlogs: tuple[UnacknowledgedData, ...]
    silent: tuple[WorkerWithoutLog, ...] = ()
    kind: str = field(default="transfer", init=False)


@dataclass(frozen=True)
class UnknownParticipants:
    """The logs of these workers do not show whether they have joined an operation."""

    operation: Operation
    waiting: tuple[str, ...]
    workers: tuple[str, ...]
    time: float
    seconds: float
    kind: str = field(default="unclear", init=False)


Finding: TypeAlias = Mismatch | Cycle | Failure | MissingWorkers | Transfer | UnknownParticipants


@dataclass(frozen=True)
class LogReason:
    """The reason for which a worker wrote its log.

    The kind is "error", "stall" (the worker waits), "waited" (others wait for it) or "signal".
    """

    kind: str
    communicator: str
    message: str
    time: float


@dataclass(frozen=True)
class State:
    """A worker at the end of its log.

    Attributes:
        worker: its name.
        rank: its rank in the job.
        host: its host's name.
        pid: its process ID.
        program: its script.
        steps: training steps begun; 0 if unknown.
        written: when its log was written.
        clock: "compared" if its clock was compared with the first log's, else "unix".
        reasons: the reasons for its log, oldest first.
        last: its last operation in each communicator in which it waits or has failed; if it does
            neither in any communicator, the last operation that ended.
        input_seconds: see `MissingWorker`.
        frames: the innermost calls of user code in its main thread.
    """

    worker: str
    rank: int
    host: str
    pid: int
    program: str
    steps: int
    written: float
    clock: str
    reasons: tuple[LogReason, ...]
    last: tuple[LastOperation, ...]
    input_seconds: float | None
    frames: tuple[str, ...]


@dataclass(frozen=True)
class CommunicatedValue:
    """A value that a training step communicates.

    Attributes:
        kind: "reduce" or "gather".
        operation: the type of the operation that needs the value.
        bytes: the size of the whole value; None if unknown.
        shape: the shape of the whole value, with None for unknown dimensions.
        where: a line of user code, or the name of the operation.
        reason: the reason for gathering it; "" for a reduction.
        remedy: how to avoid gathering it; "" if unknown.
    """

    kind: str
    operation: str
    bytes: int | None
    shape: tuple[int | None, ...]
    where: str
    reason: str
    remedy: str


@dataclass(frozen=True)
class StepCommunication:
    """The values that the training step of a model communicates.

    Attributes:
        model: the model's name.
        workers: the workers that traced this step last for the model.
        differs: whether most workers traced a different step.
        rows: the number of rows of the whole batch; None if unknown.
        reduced_bytes: the total known size of reduced values.
        gathered_bytes: the total known size of gathered values.
        sent_bytes: the total known size of values that pipeline stages send each other.
        unknown: the number of values of unknown size.
        transfers: the largest values.
        more: the number of other values.
    """

    model: str
    workers: tuple[str, ...]
    differs: bool
    rows: int | None
    reduced_bytes: int
    gathered_bytes: int
    sent_bytes: int
    unknown: int
    transfers: tuple[CommunicatedValue, ...]
    more: int


@dataclass(frozen=True)
class Diagnosis:
    """The contents of a job's flight logs, evaluated.

    Attributes:
        size: the number of workers of the job.
        without_log: the workers without a log.
        findings: the findings, most important first.
        totals: for each worker, how long it waited, and how long others waited for it, except for
            workers where both are zero; sorted by the time that others waited, longest first.
        step_communication: for each model, the values that its training step communicates; if the
            workers differ, one entry for each distinct step, most workers first.
        workers: the workers with a log.
    """

    size: int
    without_log: tuple[str, ...]
    findings: tuple[Finding, ...]
    totals: tuple[Total, ...]
    step_communication: tuple[StepCommunication, ...]
    workers: tuple[State, ...]
