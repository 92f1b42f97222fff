"""The results of a diagnosis as dataclasses; `tfdist doctor --flight --json` prints their fields.

Times are Unix times in seconds, by the clock of one host. The name of a worker contains its address
and is the same as in error messages, such as "worker 0 (a:1)". A "message" is a point-to-point
transfer between two ranks, in contrast to a collective.
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
    """Joins the names of workers: several workers by their numbers, one worker with its address.

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
    """Joins texts with commas and "and".

    Of more than 8 texts, only the first ones are shown, followed by the number of the others.

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
    """Formats a duration, such as "12.3 s"; durations below one second have more decimal places.

    Example:
        >>> seconds(12.345), seconds(0.0123)
        ('12.3 s', '0.012 s')
    """
    return f"{value:.1f} s" if value >= 1 else f"{value:.3f} s"


def moment(unix: float) -> str:
    """Formats the time of day of a Unix time.

    Example:
        >>> moment(1700000000.0)
        '22:13:20 UTC'
    """
    return _datetime(unix).strftime("%H:%M:%S UTC")


def date(unix: float) -> str:
    """Formats the date of a Unix time.

    Example:
        >>> date(1700000000.0)
        '2023-11-14'
    """
    return _datetime(unix).strftime("%Y-%m-%d")


def _datetime(unix: float) -> datetime:
    return datetime.fromtimestamp(unix, timezone.utc)


# Data is not worth naming if its estimated delivery time is below this share of the longest one.
# Such data is probably not delayed, but only happened to be in transit.
_WORTH_NAMING = 0.1
_SILENT_SECONDS = 1.0


@dataclass(frozen=True)
class UnacknowledgedData:
    """Data that a worker has sent and its receiver has not acknowledged.

    Attributes:
        sender: the sending worker.
        receiver: the receiving worker.
        bytes: the number of unacknowledged bytes.
        bytes_per_second: the rate at which data recently arrived at the receiver; 0 if unknown.
        silent_seconds: the number of seconds since data last arrived at the receiver.
    """

    sender: str
    receiver: str
    bytes: int
    bytes_per_second: float
    silent_seconds: float

    @property
    def seconds(self) -> float:
        """The estimated number of seconds that the delivery of the data takes."""
        rest = self.bytes / self.bytes_per_second if self.bytes_per_second else 0.0
        return max(rest, self.silent_seconds)


def longest(found: Iterable[UnacknowledgedData]) -> tuple[UnacknowledgedData, ...]:
    """Returns the data with the longest estimated delivery times, longest first.

    Data is left out if its estimated delivery time is less than a tenth of the longest one.
    """
    ordered = sorted(found, key=lambda one: -one.seconds)
    return tuple(one for one in ordered if one.seconds >= _WORTH_NAMING * ordered[0].seconds)


def describe_backlogs(found: Sequence[UnacknowledgedData]) -> str:
    """Describes data in transit, its senders and receivers, and which part of the network to check.

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
    """Returns the distinct senders and the distinct receivers of the data."""
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
        what: a description that contains the operation's kind, name, type and shape.
        communicator: the name of the communicator.
        number: for a collective, its number among all collectives of the group. For a message, its
            number among all messages between the two ranks in the same direction.
    """

    what: str
    communicator: str
    number: int


@dataclass(frozen=True)
class Call:
    """The description of a call of a collective, and the workers that made the same call."""

    workers: tuple[str, ...]
    what: str


@dataclass(frozen=True)
class Link:
    """A worker that waits in an operation for another worker."""

    worker: str
    operation: Operation
    waits_for: str


@dataclass(frozen=True)
class LastOperation:
    """The last operation of a worker.

    Attributes:
        operation: the collective or message.
        state: "waiting", "failed" or "ended".
        time: when the operation began if the worker waits in it; otherwise when it ended or failed.
        seconds: the number of seconds from `time` until the log was written.
    """

    operation: Operation
    state: str
    time: float
    seconds: float


@dataclass(frozen=True)
class LastReport:
    """The last status that any other worker received from a worker.

    Attributes:
        by: the worker that received the status.
        time: when `by` received the status.
        number: the number of the last collective that the sender had joined in the group.
        inside: the operation that the sender was in; None if it was in no operation.
        left: whether the sender has left the group, according to any log.
        lost: whether the sender counts as lost, according to any log.
    """

    by: str
    time: float
    number: int
    inside: str | None
    left: bool
    lost: bool


@dataclass(frozen=True)
class MissingWorker:
    """A worker that has not joined an operation, so that other workers wait for it.

    Attributes:
        worker: the name of the missing worker.
        host: the name of the missing worker's host; "" if unknown.
        seconds: how long the others have waited for the missing worker, as far as the logs show.
        has_log: whether there is a log of the missing worker.
        has_communicator: whether this log contains the communicator of the operation.
        late: whether the missing worker joined after the operation had failed on another worker.
        last: the missing worker's last collective in the group. If the others wait for a message,
            its last collective or message. None if unknown.
        input_seconds: how long the missing worker had been waiting for its next batch; None if it
            was not waiting for a batch.
        frames: the innermost calls of user code in the missing worker's main thread.
        waits: the missing worker's own waits for other workers.
        heard: the last status that another worker received from the missing worker, if any.
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
    """The first collective of a communicator that workers called differently.

    Attributes:
        communicator: the name of the communicator.
        number: the number of the collective.
        calls: the different calls, each with its workers. The call that most workers made is first.
        differs: the names of the properties in which the calls differ.
        time: when the first worker called the collective.
    """

    communicator: str
    number: int
    calls: tuple[Call, ...]
    differs: tuple[str, ...]
    time: float
    kind: str = field(default="mismatch", init=False)


@dataclass(frozen=True)
class Cycle:
    """A cycle of workers: each waits for the next, and the last waits for the first."""

    links: tuple[Link, ...]
    kind: str = field(default="cycle", init=False)


@dataclass(frozen=True)
class Failure:
    """An error that ended communicators.

    Attributes:
        message: the error message.
        workers: the workers that report the error.
        communicators: the names of the communicators that the error ended.
        time: when the error was first reported; None if unknown.
    """

    message: str
    workers: tuple[str, ...]
    communicators: tuple[str, ...]
    time: float | None
    kind: str = field(default="failure", init=False)


@dataclass(frozen=True)
class MissingWorkers:
    """An operation in which workers wait for other workers, which have not joined it.

    Attributes:
        operation: the operation. A message appears as the waiting worker called it: as a send or as
            a receive.
        waiting: the workers that wait.
        is_message: whether the operation is a message.
        all_others: whether every worker of the group is in `waiting` or in `absent`.
        time: when the first of the waiting workers began to wait.
        seconds: how long they have waited.
        absent: the missing workers. Missing workers that do not wait for other workers are first.
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
        heard: the last status that another worker received from this worker; None if no log
            contains one.
    """

    worker: str
    heard: LastReport | None


@dataclass(frozen=True)
class Transfer:
    """An operation that all workers have joined but some have not completed.

    Attributes:
        operation, waiting, time, seconds: see `MissingWorkers`.
        backlogs: the delayed data between hosts.
        silent: the members without a log, each with the last status that another worker received
            from it. Such a member may have been stopped or killed in the middle of the operation.
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
    """An operation in which workers wait for others that may or may not have joined it.

    Attributes:
        operation, waiting, time, seconds: see `MissingWorkers`.
        workers: the workers for which the logs do not show whether they have joined the operation.
    """

    operation: Operation
    waiting: tuple[str, ...]
    workers: tuple[str, ...]
    time: float
    seconds: float
    kind: str = field(default="unclear", init=False)


Finding: TypeAlias = Mismatch | Cycle | Failure | MissingWorkers | Transfer | UnknownParticipants


@dataclass(frozen=True)
class LogReason:
    """The reason why a worker wrote its log.

    Attributes:
        kind: "error", "stall" (this worker has waited for a long time), "waited" (another worker
            has waited for a long time) or "signal" (the user has requested the log by a signal).
        communicator: the name of the communicator with the error or the wait; "" if there is none.
        message: the error message, or another description of the reason.
        time: when the error, the wait or the signal made the worker write its log.
    """

    kind: str
    communicator: str
    message: str
    time: float


@dataclass(frozen=True)
class State:
    """The state of a worker when its log was written.

    Attributes:
        worker: its name.
        rank: its rank in the job.
        host: its host's name.
        pid: its process ID.
        program: its script.
        steps: the number of training steps that it had begun; 0 if unknown.
        written: when its log was written.
        clock: how its times were translated to the clock of the first log's host. "compared" means
            that the workers had measured the difference between the two clocks. "unix" means that
            both clocks are assumed to show the same Unix time.
        reasons: the reasons why its log was written, oldest first.
        last: for each communicator in which it waits or has failed, the operation in which it waits
            or has failed. If there is no such communicator, only the last operation that ended.
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
        kind: "reduce" or "gather"; "send" if a pipeline stage sends the value to another stage.
        operation: the type of the TensorFlow operation that needs the value.
        bytes: the size of the whole value in bytes; None if unknown.
        shape: the shape of the whole value, with None for unknown dimensions.
        where: the line of user code that needs the value, or else the name of the operation.
        reason: why the value is gathered; "" if it is not gathered.
        remedy: how the user can change the program to avoid the gather; "" if unknown.
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
        workers: the workers that have traced this step, and no newer step of the same model.
        differs: False for the usual step of the model, which most workers have traced; True for any
            other step.
        rows: the number of rows of the global batch; None if unknown.
        reduced_bytes: the total size of the reduced values, as far as it is known.
        gathered_bytes: the total size of the gathered values, as far as it is known.
        sent_bytes: the total size of the values that pipeline stages send to each other, as far as
            it is known.
        unknown: the number of values of unknown size.
        transfers: the largest values.
        more: the number of values that are not in `transfers`.
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
    """Everything that the flight logs of a job show about why the job failed or hangs.

    Attributes:
        size: the number of workers of the job.
        without_log: the workers without a log.
        findings: the explanations for the failure or hang, most important first.
        totals: for each worker, how long it waited for others, and how long others waited for it. A
            worker is left out if both times are 0. The worker that others waited for longest is
            first.
        step_communication: for each model, the values that its training step communicates. If the
            workers run different steps, there is one entry for each different step, and the step
            that most workers run is first.
        workers: the workers with a log.
    """

    size: int
    without_log: tuple[str, ...]
    findings: tuple[Finding, ...]
    totals: tuple[Total, ...]
    step_communication: tuple[StepCommunication, ...]
    workers: tuple[State, ...]
