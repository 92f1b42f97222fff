"""Lists of workers, durations and times as people write them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timezone

_WORKER = re.compile(r"(\w+) (\d+) \(.*\)")
_MOST = 8


def workers(names: Sequence[str]) -> str:
    """Several workers; one alone keeps its address.

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
    """Parts joined by commas and "and"; of many, the first and the number of the others.

    Example:
        >>> listed(["a", "b", "c"])
        'a, b and c'
    """
    shown = list(parts)
    if len(shown) > _MOST:
        shown[_MOST - 1 :] = [f"{len(shown) - _MOST + 1} more"]
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
    """A duration, as in "12.3 s"; more digits below a second.

    Example:
        >>> seconds(12.345), seconds(0.0123)
        ('12.3 s', '0.012 s')
    """
    return f"{value:.1f} s" if value >= 1 else f"{value:.3f} s"


def moment(unix: float) -> str:
    """A time of day.

    Example:
        >>> moment(1700000000.0)
        '22:13:20 UTC'
    """
    return _datetime(unix).strftime("%H:%M:%S UTC")


def date(unix: float) -> str:
    """A day.

    Example:
        >>> date(1700000000.0)
        '2023-11-14'
    """
    return _datetime(unix).strftime("%Y-%m-%d")


def _datetime(unix: float) -> datetime:
    return datetime.fromtimestamp(unix, timezone.utc)
