"""The message shown to the user when a job has failed."""

from __future__ import annotations

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
