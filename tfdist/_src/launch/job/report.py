"""The messages to the user when a worker or a job has failed, starts again, or has ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from tfdist._src.exit_codes import PREEMPTED
from tfdist._src.launch.job.failure import Failure, Loss

SAVED = (
    f"have saved their state, and the job ends with code {PREEMPTED}; the same command "
    "continues it."
)


def describe(failure: Failure, host: int, log_dir: Path | None) -> str:
    """Describes what failed first and where to find its output.

    Args:
        failure: the first failure of the job.
        host: the number of this host.
        log_dir: the directory with this host's log files; None if there are none.

    Returns:
        One or several lines.

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


# All workers start again.


def describe_restart(number: int, limit: int, delay: float, failure: Failure) -> str:
    """Announces that the job starts again: when, and why.

    Args:
        number: the number of the restart.
        limit: the number of restarts allowed.
        delay: seconds until the restart.
        failure: the reason.
    """
    at = time.strftime("%H:%M:%S", time.localtime(time.time() + delay))
    return f"Restart {number} of {limit} in {delay:g} s, at {at}, because {clause(failure)}."


def describe_success(failures: Sequence[Failure]) -> str:
    """Lists the failures of a job that has succeeded in the end; "" if there were none."""
    if not failures:
        return ""
    times = _times(len(failures))
    return f"All workers have succeeded, after the job has failed {times}:\n{_history(failures)}"


def describe_failures(failures: Sequence[Failure], reason: str) -> str:
    """Lists the failures of a job that has failed; "" if there is nothing to add to the last one.

    Args:
        failures: the first failure of each generation.
        reason: why the job is not started again, as a clause; "" if this was not requested.

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


# One worker is replaced.


def describe_loss(loss: Loss, *, others: bool) -> str:
    """Describes a worker that has failed, in one line.

    Args:
        loss: the loss.
        others: whether other workers are running.

    Example:
        >>> killed = Failure(host=0, subject="worker 1", event="was killed by SIGKILL", code=137,
        ...                  rank=1, step=120)
        >>> describe_loss(Loss(killed, "replaced at once", final=False), others=True)
        'worker 1 was killed by SIGKILL, after step 120; replaced at once. The others go on.'
    """
    if loss.late:
        end = ""
    elif others:
        end = " The others go on."
    else:
        end = " No other worker is running here." if loss.final else ""
    log = f" Its log: {loss.failure.log}" if loss.failure.log else ""
    return f"{clause(loss.failure)}; {loss.fate}.{end}{log}"


def describe_leave(failure: Failure, *, others: bool) -> str:
    """Describes a worker that has left on request, in one line."""
    return f"{failure}{' The others go on without it.' if others else ''}"


def mark(rank: int, replacement: str) -> str:
    """The line in a worker's log before the output of its replacement."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"--- tfdist run: {replacement} of worker {rank} starts at {now} ---"


def describe_end(losses: Sequence[Loss], code: int, *, completed: bool) -> str:
    """Describes the end of the job, with every loss; "" if there is nothing to report.

    Args:
        losses: the losses in order.
        code: the exit code.
        completed: whether a worker has completed the training.
    """
    if not losses and code != PREEMPTED:
        return ""
    if code == PREEMPTED:
        head = f"The workers that remained {SAVED}"
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
    """The failure with its place and cause, as a clause."""
    cause = f" ({failure.cause})" if failure.cause else ""
    place = "" if failure.step is not None or failure.rank is None else ", at no known step"
    return f"{str(failure).removesuffix('.')}{cause}{place}"


def date(seconds: float) -> str:
    """The local time of seconds since 1970."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
