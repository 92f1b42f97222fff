"""The messages shown to the user when a job has failed, and when it starts again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from tfdist.launch.job.failure import Failure


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


def describe_restart(number: int, limit: int, delay: float, failure: Failure) -> str:
    """Says that the job is started again, when, and why.

    Args:
        number: which restart this is.
        limit: how many there may be.
        delay: seconds until it begins.
        failure: why.
    """
    at = time.strftime("%H:%M:%S", time.localtime(time.time() + delay))
    return f"Restart {number} of {limit} in {delay:g} s, at {at}, because {clause(failure)}."


def describe_history(failures: Sequence[Failure]) -> str:
    """One line for each generation that failed: when, and what failed why.

    Example:
        >>> killed = Failure(host=0, subject="worker 1", event="was killed by SIGKILL", code=137,
        ...                  step=120)
        >>> print(describe_history([killed]))
          generation 0 at 1970-01-01 00:00:00: worker 1 was killed by SIGKILL, after step 120
    """
    return "\n".join(
        f"  generation {number} at {date(failure.time)}: {clause(failure)}"
        for number, failure in enumerate(failures)
    )


def clause(failure: Failure) -> str:
    """What failed, where and why, as a clause."""
    cause = f" ({failure.cause})" if failure.cause else ""
    place = "" if failure.step is not None or failure.rank is None else ", at no known step"
    return f"{str(failure).removesuffix('.')}{cause}{place}"


def date(seconds: float) -> str:
    """The local time of seconds since 1970."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
