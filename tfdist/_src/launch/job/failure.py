"""Failures of workers and hosts: their data, their causes, and the messages about them."""

import enum
import math
import re
import signal
import time
import types
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from time import time as wall_clock
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from tfdist._src.options import PREEMPTED, SIGNAL_BASE
from tfdist._src.progress_file import Progress, UncaughtException

_T = TypeVar("_T")
# Messages with larger numbers are rejected, because clocks and system calls do not accept them.
_MAX_INTEGER = 1 << 53
_MAX_SECONDS = 1e11


def decode(kind: type[_T], value: object) -> _T:
    """Converts a value that was received as JSON to a Python type.

    For dataclasses, this is the inverse of `dataclasses.asdict`.

    Args:
        kind: the type: `int`, `float`, `str`, `bool`, an `IntEnum`, `tuple[X, ...]`, or a
            dataclass. The attributes of the dataclass must have these types or types such as
            `X | None`. Its constructor may raise ValueError if the value of an attribute is
            invalid.
        value: the value, a result of `json.loads`.

    Raises:
        ValueError: the value does not have the type `kind`.

    Example:
        >>> decode(tuple[int, ...], [1, 2])
        (1, 2)
    """
    read: _T = _read(kind, value)
    return read


def _read(kind: Any, value: Any) -> Any:
    if get_origin(kind) is types.UnionType:
        (inner,) = [one for one in get_args(kind) if one is not types.NoneType]
        return None if value is None else _read(inner, value)
    if get_origin(kind) is tuple:
        if type(value) is list:
            return tuple(_read(get_args(kind)[0], one) for one in value)
    elif is_dataclass(kind):
        make: Any = kind
        if type(value) is dict and value.keys() == {field.name for field in fields(kind)}:
            hints = get_type_hints(kind)
            return make(**{name: _read(hints[name], one) for name, one in value.items()})
    elif kind is float:
        if type(value) in (int, float) and abs(value) <= _MAX_SECONDS and math.isfinite(value):
            return float(value)
    elif issubclass(kind, enum.IntEnum):
        if type(value) is int:
            return kind(value)
    elif type(value) is kind and (kind is not int or abs(value) <= _MAX_INTEGER):
        return value
    raise ValueError(f"sent something that is not {kind!r}")


# The names of the exceptions that a worker raises if it has lost another worker.
_LOST_PEER = ("PeerLostError", "UnavailableError")
# The line of a traceback that names the exception, and the lines between two chained exceptions.
_EXCEPTION = re.compile(r"(?:\w+\.)*(\w*(?:Error|Exception|Interrupt|Exit))(?::\s*(.*)|$)")
_CHAINED = ("The above exception was the direct cause", "During handling of the above exception")


class Doubt(enum.IntEnum):
    """How likely it is that a failure is only the consequence of another failure."""

    NONE = 0
    UNSEEN = 1  # The launcher cannot tell, because the worker's output went to the terminal.
    VICTIM = 2  # The worker has failed because it has lost another worker.
    PREEMPTED = 3  # The worker has saved its state. No failure if all other workers do so, too.


@dataclass(frozen=True)
class Failure:
    """The failure of one worker or one host.

    Attributes:
        host: the number of the host on which the failure has occurred.
        subject: what has failed: `"worker 3"`, `"host 1"` or `"this command"`.
        event: what has happened, as a predicate: `subject` and `event` form a sentence.
        code: the exit code of the launcher if this failure ends the job.
        doubt: how likely the failure is only the consequence of another failure.
        tail: the last lines of the worker's output.
        rank: the worker's rank; None if a host or a launcher has failed.
        log: the path of the worker's log file on its host; "" if its output went to the terminal.
        status: the worker's exit code, or the negative number of the signal that killed the worker;
            None if a host or a launcher has failed.
        time: when the failure has occurred, in seconds since 1970.
        step: the number of training steps that the job had completed; None if unknown.
        classes: the names of the class and the base classes of the exception that ended the worker;
            empty if unknown.
        message: the first line of the message of this exception.
        stopped: whether the failure is that a signal asked a launcher to stop.
    """

    host: int
    subject: str
    event: str
    code: int
    doubt: Doubt = Doubt.NONE
    tail: tuple[str, ...] = ()
    rank: int | None = None
    log: str = ""
    status: int | None = None
    time: float = 0.0
    step: int | None = None
    classes: tuple[str, ...] = ()
    message: str = ""
    stopped: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.code < 256 or self.time < 0:
            raise ValueError("a failure has an exit code from 1 to 255, and a time")

    def __str__(self) -> str:
        """Describes the failure in one sentence."""
        after = "" if self.step is None else f", after step {self.step}"
        return f"{self.subject} {self.event}{after}."

    @property
    def cause(self) -> str:
        """The class name and the message of the exception that ended the worker; "" if unknown."""
        return ": ".join(filter(None, (*self.classes[:1], self.message)))

    @property
    def preemption(self) -> bool:
        """Whether the workers have been asked to stop, but have time to save their state first."""
        asked = self.stopped and self.code != SIGNAL_BASE + signal.SIGINT
        return asked or self.doubt == Doubt.PREEMPTED


def worker_failure(
    *,
    host: int,
    rank: int,
    status: int,
    tail: Sequence[str],
    log: str,
    progress: Progress | None = None,
    time: float = 0.0,
) -> Failure:
    """Returns the failure of a worker that exited with an error.

    Args:
        host: the number of the worker's host.
        rank: the worker's rank in the job.
        status: the worker's exit code, or the negative number of the signal that killed it.
        tail: the last lines of the worker's output.
        log: the path of the worker's log file; "" if its output went to the terminal, so that the
            launcher has not read it.
        progress: the progress that the worker has reported.
        time: when the worker exited, in seconds since 1970.

    Example:
        >>> failure = worker_failure(host=0, rank=1, status=-11, tail=[], log="worker-1.log")
        >>> failure.subject, failure.event, failure.code
        ('worker 1', 'was killed by SIGSEGV', 139)
    """
    progress = progress or Progress()
    raised = None
    if status < 0:
        hint = ", often because the host ran out of memory" if status == -9 else ""
        event, code = f"was killed by {signal_name(-status)}{hint}", SIGNAL_BASE - status
        # A worker that has lost a peer raises an exception. So a signal has another cause.
        doubt = Doubt.NONE
    elif status == PREEMPTED:
        event, code = f"has saved its state and exited with code {status}", status
        doubt = Doubt.PREEMPTED
    else:
        event, code = f"failed with exit code {status}", status
        found = _last_exceptions(tail)
        raised = progress.raised or _last_raised(found)
        doubt = Doubt.NONE if log or raised else Doubt.UNSEEN
        names = [name for name, _ in found]
        if progress.raised is not None:
            names = [progress.raised.classes[0], *progress.raised.chained]
        if any(name in _LOST_PEER for name in names):
            doubt = Doubt.VICTIM
    return Failure(
        host=host,
        subject=f"worker {rank}",
        event=event,
        code=code,
        doubt=doubt,
        tail=tuple(tail),
        rank=rank,
        log=log,
        status=status,
        time=time,
        step=progress.steps,
        classes=raised.classes if raised else (),
        message=raised.message if raised else "",
    )


def _last_exceptions(tail: Sequence[str]) -> list[tuple[str, str]]:
    """Finds the last exception in a worker's output, and the exceptions that are chained to it.

    Returns:
        The class name and the message of each of these exceptions, the last exception first. Both
        are empty between two chained exceptions.
    """
    found: list[tuple[str, str]] = []
    for line in reversed(tail):
        if line.startswith(_CHAINED):
            found.append(("", ""))
        elif match := _EXCEPTION.match(line):
            if found and found[-1][0]:
                break
            found.append((match[1], match[2] or ""))
    return found


def _last_raised(found: Sequence[tuple[str, str]]) -> UncaughtException | None:
    return next((UncaughtException((name,), (), message) for name, message in found if name), None)


def stopped_by(host: int, number: signal.Signals) -> Failure:
    """Returns a failure that says that a signal asked the launcher of a host to stop."""
    subject = "this command" if host == 0 else f"the command on host {host}"
    return Failure(
        host=host,
        subject=subject,
        event=f"was stopped by {number.name}",
        code=SIGNAL_BASE + number,
        time=wall_clock(),
        stopped=True,
    )


def lost_host(host: int, address: str) -> Failure:
    """Returns a failure that says that the connection to a host was lost."""
    return Failure(
        host=host,
        subject=f"host {host} ({address})",
        event="was lost: its launcher died or the network connection broke",
        code=1,
        time=wall_clock(),
    )


class FirstFailure:
    """Chooses the failure that probably caused all other failures of a job.

    A failure is doubtful if another failure may have caused it (see `Doubt`); otherwise it is
    clear. A clear failure is chosen immediately. After a doubtful failure, the choice is delayed,
    because a clearer failure may follow. After the delay, the least doubtful failure is chosen; if
    several failures are equally doubtful, the earliest of them.

    This class does not read a clock: the caller passes the current time.

    Args:
        delay: the number of seconds between a doubtful failure and the choice.
        patience: the number of additional seconds if the failure is that a worker has exited with
            code 75. In this time, the other workers may also save their state and exit.
        decides: whether this host makes the choice for all hosts. If not, the choice is also
            delayed after a clear failure, so that the choice of the other host can arrive.

    Example:
        >>> first = FirstFailure(delay=1.0)
        >>> first.add(lost_host(1, "10.0.0.2"), now=5.0)
        >>> first.decided(5.0).subject
        'host 1 (10.0.0.2)'
    """

    def __init__(self, delay: float, decides: bool = True, patience: float = 0.0) -> None:
        self._delay = delay
        self._patience = patience
        self._decides = decides
        self._candidates: list[Failure] = []
        self.deadline: float | None = None

    def add(self, failure: Failure, now: float) -> None:
        """Adds a failure; the failures must be added in the order in which they have occurred."""
        self._candidates.append(failure)
        delay = 0.0 if failure.doubt == Doubt.NONE and self._decides else self._delay
        if failure.doubt == Doubt.PREEMPTED:
            delay += self._patience
        self.deadline = min(now + delay, math.inf if self.deadline is None else self.deadline)

    def decided(self, now: float) -> Failure | None:
        """Returns the chosen failure; None if there is no failure, or the delay has not passed."""
        if self.deadline is None or now < self.deadline:
            return None
        return self.most_likely()

    def most_likely(self) -> Failure | None:
        """Returns the most likely cause among the failures so far; None if there are none."""
        return min(self._candidates, key=lambda failure: failure.doubt, default=None)


@dataclass(frozen=True)
class Loss:
    """A failure after which the other workers of the job keep running.

    Attributes:
        failure: the failure of a worker or a host.
        fate: how the launcher reacts to the failure, such as `"replaced at once"`.
        final: whether the worker or host is lost for good, because it is not replaced.
        late: whether another worker had completed the training before the failure.
    """

    failure: Failure
    fate: str
    final: bool
    late: bool = False


def decisive(losses: Sequence[Loss], *, completed: bool, left: bool) -> Failure | None:
    """Returns the failure that makes an elastic job fail; None if the job does not fail.

    The job does not fail if it loses a worker and the other workers complete the training, or save
    their state on request. It does fail if a worker fails after another worker has completed the
    training.

    Args:
        losses: the losses, in the order in which they have occurred.
        completed: whether at least one worker has exited with code 0.
        left: whether at least one worker has saved its state and exited with code 75.
    """
    failures = [loss.failure for loss in losses if loss.late]
    if not failures and not (completed or left):
        failures = [loss.failure for loss in losses if loss.final]
    # Prefer the earliest failure that is not only the consequence of another failure.
    return min(failures, key=lambda failure: failure.doubt == Doubt.VICTIM, default=None)


def signal_name(number: int) -> str:
    """Returns the name of a signal, such as `SIGKILL`; `signal 77` if 77 is not a known signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


SAVED = (
    f"have saved their state, and the job ends with code {PREEMPTED}; the same command "
    "continues it."
)


def describe(failure: Failure, host: int, log_dir: Path | None) -> str:
    """Describes the first failure of a job, and where to find the output of the failed worker.

    Args:
        failure: the first failure of the job.
        host: the number of this host.
        log_dir: the directory with the log files of this host's workers; None if there are none.

    Returns:
        One or more lines.

    Example:
        >>> failure = Failure(host=0, subject="worker 0", event="failed with exit code 3", code=3,
        ...                   rank=0)
        >>> describe(failure, 0, None)
        'worker 0 failed with exit code 3. Its output is above.'
    """
    elsewhere = "" if failure.host == host else f" on host {failure.host}"
    lines = [str(failure)]
    if failure.rank is not None:
        if not failure.log:
            place = f"in the terminal of host {failure.host}" if elsewhere else "above"
            lines[0] += f" Its output is {place}."
        elif failure.tail:
            lines[0] += " Last lines of its output:"
            lines += [f"  | {line}" for line in failure.tail]
            lines.append(f"  Full output{elsewhere}: {failure.log}")
        else:
            lines[0] += f" Its log{elsewhere} is empty: {failure.log}."
    if log_dir is not None and (elsewhere or not failure.log):
        lines.append(f"  Worker logs on this host: {log_dir}")
    return "\n".join(lines)


# The messages below are for jobs in which all workers restart together.


def describe_restart(number: int, limit: int, delay: float, failure: Failure) -> str:
    """Returns a message that announces when all workers will restart, and why.

    Args:
        number: the number of the restart; 1 for the first restart.
        limit: the maximum number of restarts.
        delay: the number of seconds until the restart.
        failure: the failure that is the reason for the restart.
    """
    at = time.strftime("%H:%M:%S", time.localtime(time.time() + delay))
    return f"Restart {number} of {limit} in {delay:g} s, at {at}, because {clause(failure)}."


def describe_success(failures: Sequence[Failure]) -> str:
    """Lists the failures of a job that has succeeded after restarts; "" if there are none."""
    if not failures:
        return ""
    times = _times(len(failures))
    return f"All workers have succeeded, after the job has failed {times}:\n{_history(failures)}"


def describe_failures(failures: Sequence[Failure], reason: str) -> str:
    """Lists the failures of a job that has failed, and says why the job is not restarted.

    Args:
        failures: the first failure of each generation.
        reason: why the job is not restarted, as a clause; "" if the user has not requested
            restarts.

    Returns:
        One or more lines. "" if there is only one failure, which has already been printed, and no
        reason.

    Example:
        >>> killed = Failure(host=0, subject="worker 1", event="was killed by SIGKILL", code=137,
        ...                  step=120)
        >>> print(describe_failures([killed, killed], ""))
        The job has failed 2 times.
          generation 0 at 1970-01-01 00:00:00: worker 1 was killed by SIGKILL, after step 120
          generation 1 at 1970-01-01 00:00:00: worker 1 was killed by SIGKILL, after step 120
    """
    if len(failures) > 1:
        end = f" and is not started again: {reason}." if reason else "."
        return f"The job has failed {_times(len(failures))}{end}\n{_history(failures)}"
    return f"The job is not started again: {reason}." if reason else ""


def _times(count: int) -> str:
    return f"{count} {'time' if count == 1 else 'times'}"


def _history(failures: Sequence[Failure]) -> str:
    return "\n".join(
        f"  generation {number} at {date(failure.time)}: {clause(failure)}"
        for number, failure in enumerate(failures)
    )


# The messages below are for elastic jobs, in which only the failed worker is replaced.


def describe_loss(loss: Loss, *, others: bool) -> str:
    """Describes a loss in one line.

    Args:
        loss: the loss.
        others: whether any other worker of the job is running.

    Example:
        >>> killed = Failure(host=0, subject="worker 1", event="was killed by SIGKILL", code=137,
        ...                  rank=1, step=120)
        >>> describe_loss(Loss(killed, "replaced at once", final=False), others=True)
        'worker 1 was killed by SIGKILL, after step 120; replaced at once. The others continue.'
    """
    if loss.late:
        end = ""
    elif others:
        end = " The others continue."
    else:
        end = " No other worker is running here." if loss.final else ""
    log = f" Its log: {loss.failure.log}" if loss.failure.log else ""
    return f"{clause(loss.failure)}; {loss.fate}.{end}{log}"


def describe_leave(failure: Failure, *, others: bool) -> str:
    """Describes, in one line, a worker that was asked to stop and has saved its state."""
    return f"{failure}{' The others continue without it.' if others else ''}"


def mark(rank: int, replacement: str) -> str:
    """Returns a line that separates a worker's output from its replacement's in the log file."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"--- tfdist run: {replacement} of worker {rank} starts at {now} ---"


def describe_end(losses: Sequence[Loss], code: int, *, completed: bool) -> str:
    """Describes how an elastic job has ended, and lists all losses.

    Args:
        losses: the losses, in the order in which they have occurred.
        code: the exit code of the job.
        completed: whether any worker has completed the training.

    Returns:
        One or more lines; "" if there are no losses and the exit code is not 75.
    """
    if not losses and code != PREEMPTED:
        return ""
    if code == PREEMPTED:
        head = f"The remaining workers {SAVED}"
    elif code:
        head = "The job has failed in the end." if completed else "The job has failed."
    else:
        head = "The training is complete."
    if not losses:
        return head
    for_good = [loss.failure.subject for loss in losses if loss.final and not loss.late]
    if for_good and not code:
        head += f" It was completed without {', '.join(for_good)}."
    lines = (f"  {date(loss.failure.time)}: {clause(loss.failure)}; {loss.fate}" for loss in losses)
    return "\n".join([f"{head} Failures:", *lines])


def clause(failure: Failure) -> str:
    """Describes a failure, the step after which it occurred, and its cause, as a clause."""
    cause = f" ({failure.cause})" if failure.cause else ""
    place = "" if failure.step is not None or failure.rank is None else ", at no known step"
    return f"{str(failure).removesuffix('.')}{cause}{place}"


def date(seconds: float) -> str:
    """Formats a time in seconds since 1970 as a local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
