"""Whether a job that has failed is started again, and when: decided from its failures so far."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tfdist.exit_codes import PREEMPTED
from tfdist.launch.job.failure import Failure

# Seconds before the first restart, doubled with each failure without progress.
_FIRST_DELAY = 1.0
_LONGEST_DELAY = 60.0
# A job that runs this many seconds is training, even if it counts no steps, as in a custom loop.
_LONG = 600.0
_USAGE_ERROR = 2
# Starting again cannot change these: the program, what is installed, or a refused configuration.
_HOPELESS = frozenset(
    {
        "SyntaxError",
        "IndentationError",
        "TabError",
        "ImportError",
        "ModuleNotFoundError",
        "ClusterError",
        "NativeUnavailableError",
        "PartitionError",
        "ProgramMismatchError",
        "ScheduleError",
        "SnapshotError",
        "TlsError",
        "UnsupportedError",
    }
)
# Nor these, mistakes in the program or its arguments, if no step was ever completed. Later they may
# come from data, or from a damaged file, and only the second time tells.
_HOPELESS_AT_FIRST = frozenset({"ValueError", "TypeError", "NameError", "AttributeError"})
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True)
class Ended:
    """A generation that has failed.

    Attributes:
        failure: its first failure.
        seconds: how long it ran.
    """

    failure: Failure
    seconds: float


@dataclass(frozen=True)
class Restart:
    """The job is started again.

    Attributes:
        delay: seconds until then.
    """

    delay: float


@dataclass(frozen=True)
class End:
    """The job has ended.

    Attributes:
        reason: why it is not started again, as a clause; "" if nobody asked for that.
    """

    reason: str


def decide(history: Sequence[Ended], limit: int) -> Restart | End:
    """Decides after a failure.

    Args:
        history: the generations so far, the one that has just failed last.
        limit: how often the job may be started again.

    Example:
        >>> failure = Failure(host=0, subject="worker 1", event="was killed", code=137, step=7)
        >>> decide([Ended(failure, 60.0)], 3)
        Restart(delay=1.0)
        >>> decide([Ended(failure, 60.0), Ended(failure, 60.0)], 3)
        End(reason='it has failed in the same way at the same step before')
    """
    last = history[-1]
    if limit == 0 or last.failure.stopped:
        return End("")
    if reason := _hopeless(history):
        return End(reason)
    if any(_same(last, earlier) for earlier in history[:-1]):
        place = "at the same step" if last.failure.step else "before its first step"
        return End(f"it has failed in the same way {place} before")
    if len(history) > limit:
        return End(f"--max-restarts {limit} is reached")
    return Restart(back_off(in_vain(history)))


def all_saved(failure: Failure, codes: Collection[int]) -> bool:
    """Whether the job was preempted: its workers were asked to stop, and have saved their state.

    Args:
        failure: the first failure of the job.
        codes: the exit codes of all its workers, negative for signals.
    """
    return failure.preemption and PREEMPTED in codes and {0, PREEMPTED}.issuperset(codes)


def _hopeless(history: Sequence[Ended]) -> str:
    """Why another start would end like this one; "" if it may not."""
    failure = history[-1].failure
    if failure.rank is None:
        return "a host that is lost cannot be started again from here"
    if failure.status == _USAGE_ERROR:
        return "exit code 2, a usage error, would come again"
    if found := [name for name in failure.classes if name in _HOPELESS]:
        return f"{_a(found[0])} would come again"
    found = [name for name in failure.classes if name in _HOPELESS_AT_FIRST]
    if found and not any(ended.failure.step for ended in history):
        return f"{_a(found[0])} before the first step would come again"
    return ""


def _same(one: Ended, other: Ended) -> bool:
    """Whether two failures are the same one, at the same step; on whichever worker."""
    if one.failure.step is None and max(one.seconds, other.seconds) >= _LONG:
        return False  # They trained, and nobody knows how far.
    return _signature(one.failure) == _signature(other.failure)


def _signature(failure: Failure) -> tuple[object, ...]:
    # Numbers in messages are often ports, process IDs or times.
    message = _NUMBER.sub("#", failure.message)
    return failure.step, failure.status, failure.classes[:1], message


def in_vain(history: Sequence[Ended]) -> int:
    """How many of the last failures have come without progress since the one before them."""
    best = 0
    count = 0
    for ended in history:
        step = ended.failure.step or 0
        if step > best or ended.seconds >= _LONG:
            count = 0
        elif ended is not history[0]:
            count += 1
        best = max(best, step)
    return count


def back_off(count: int) -> float:
    """Seconds to wait after failures in vain: doubled with each."""
    return min(_FIRST_DELAY * 2.0 ** min(count, 99), _LONGEST_DELAY)


def _a(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
