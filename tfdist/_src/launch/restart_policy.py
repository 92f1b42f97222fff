"""The common interface of the restart policies, and the decision whether to start again.

A policy receives events, such as the exit of a worker, and returns actions, which `supervisor.py`
executes. It uses no processes, sockets or clocks. The policies are:

- "none", `RestartAll` with a limit of 0: a failure stops all workers;
- "all", `RestartAll`: a failure stops all workers, and they start again together;
- "one", `RestartOne`: only the failed worker is replaced, and the others keep running.
"""

import logging
import re
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tfdist._src.launch.job.failure import Failure
from tfdist._src.launch.job.shutdown import Grace
from tfdist._src.options import PREEMPTED

HOST_0 = 0
# Seconds before the first restart, doubled after each failure without progress.
_FIRST_DELAY = 1.0
_MAX_DELAY = 60.0
# A job that ran for this many seconds is assumed to have trained, even if it counted no steps, as
# in a custom loop.
_LONG = 600.0
_USAGE_ERROR = 2
# Another start cannot fix the program, the installed packages, or a rejected configuration.
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
# Before the first completed step, these errors are mistakes in the program or its arguments, which
# another start cannot fix. Later they may be caused by data or by a damaged file; then only a
# second failure at the same step ends the job.
_HOPELESS_AT_FIRST = frozenset({"ValueError", "TypeError", "NameError", "AttributeError"})
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True)
class Begin:
    """Begins a generation: the workers that start next have their own folder and secret.

    Host 0 also sends it to the other hosts.

    Attributes:
        generation: its number.
        secret: its workers' secret; "" to keep the current one.
    """

    generation: int
    secret: str = field(default="", repr=False)


@dataclass(frozen=True)
class Start:
    """Starts a worker.

    Attributes:
        rank: its rank.
        replacement: `"replacement 1 of 3"` for a worker that replaces a failed worker; else "". If
            a replacement cannot start, `unavailable` is called; if any other worker cannot start,
            the command ends.
    """

    rank: int
    replacement: str = ""


@dataclass(frozen=True)
class Stop:
    """Sends workers signals of increasing force until they exit.

    Attributes:
        ranks: the workers.
        first: the first signal.
        grace: seconds from one signal to the next.
        at: when to send the first signal.
    """

    ranks: tuple[int, ...]
    first: signal.Signals
    grace: float
    at: float


@dataclass(frozen=True)
class EscalateSignal:
    """Sends this signal now to workers that are being stopped, unless a harder one was sent."""

    signal: signal.Signals


@dataclass(frozen=True)
class Send:
    """Sends a message to the other hosts: host 0 to all of them, the others to host 0."""

    kind: str
    value: object = None


@dataclass(frozen=True)
class PrintMessage:
    """Prints a message; begins a new line if a worker's last line may be unfinished."""

    text: str
    below_output: bool = True
    level: int = logging.INFO


@dataclass(frozen=True)
class PrintFailure:
    """Prints a failure with the worker's last lines, and the command that explains flight logs.

    Attributes:
        failure: the failure; None for the command only.
    """

    failure: Failure | None


@dataclass(frozen=True)
class End:
    """Ends the command.

    Attributes:
        code: its exit code.
        summary: the last message; "" for none.
    """

    code: int
    summary: str = ""


Action = Begin | Start | Stop | EscalateSignal | Send | PrintMessage | PrintFailure | End


class RestartPolicy:
    """Decides, together with the other hosts, when to stop or start the workers of one host.

    Times are in seconds of any clock. Call `take` after each event, and `advance` regularly.

    Args:
        ranks: the workers of this host, which start immediately.
        host: this host's number.
        hosts: the other hosts connected to this one: on host 0 all, else host 0.
        grace: seconds between signals of increasing force.

    Attributes:
        addresses: the addresses of all workers, if they have changed; otherwise empty.
        next_look: when to call `suspended`; None for never.
    """

    addresses: tuple[str, ...] = ()
    next_look: float | None = None

    def __init__(self, ranks: Sequence[int], host: int, hosts: Iterable[int], grace: Grace) -> None:
        self._ranks = tuple(ranks)
        self._host = host
        self._connected = set(hosts)
        self._grace = grace
        self._running: set[int] = set()
        self._actions: list[Action] = []

    def take(self) -> list[Action]:
        """Returns the actions not returned yet, in order."""
        actions, self._actions = self._actions, []
        return actions

    def _do(self, *actions: Action) -> None:
        self._actions += actions

    def _stop_workers(
        self, first: signal.Signals, stop: Failure | None, at: float, ranks: Collection[int]
    ) -> None:
        """Stops workers; gives them time to save their state if `stop` requires it."""
        saves = stop is not None and stop.preemption
        grace = self._grace.preemption if saves else self._grace.failure
        if ranks:
            self._do(Stop(tuple(sorted(ranks)), first, grace, at))

    @property
    def next_time(self) -> float | None:
        """The time to call `advance` even if no event occurs; None for never."""
        raise NotImplementedError

    @property
    def has_failed(self) -> bool:
        """Whether any failure has occurred so far; if so, the logs are kept."""
        raise NotImplementedError

    def exited(self, rank: int, failure: Failure | None, now: float, stuck: str = "") -> None:
        """Handles the exit of a worker.

        Args:
            rank: its rank.
            failure: None if its exit code was 0.
            now: the current time.
            stuck: if the worker still runs after SIGKILL and is given up, its rank and process ID
                as text; else "".
        """
        raise NotImplementedError

    def signaled(self, number: signal.Signals, stop: Failure, now: float) -> None:
        """Handles a signal that asks this command to stop; `stop` describes it."""
        raise NotImplementedError

    def received(self, host: int, kind: str, value: object, now: float) -> None:
        """Handles a message; raises ValueError if it is not valid."""
        raise NotImplementedError

    def lost(self, host: int, failure: Failure, now: float) -> None:
        """Handles the loss of the connection to another host."""
        raise NotImplementedError

    def advance(self, now: float) -> None:
        """Handles due actions and the consequences of the events since the last call."""
        raise NotImplementedError

    # The methods below concern policies that replace workers.

    @property
    def joining(self) -> Collection[int]:
        """The replacements whose first step must be reported by `trained`."""
        return ()

    @property
    def wants_spares(self) -> bool:
        """Whether a replacement may still start."""
        return False

    @property
    def is_over(self) -> bool:
        """Whether no host can join the job any more."""
        return True

    def trained(self, rank: int) -> None:
        """Records that a replacement has completed a step."""

    def unavailable(self, rank: int, why: str) -> None:
        """Records that a replacement could not be started."""

    def suspended(self, ranks: Collection[int], now: float) -> None:
        """Records which workers are suspended (SIGSTOP)."""

    def admitted(self, hosts: Mapping[int, str], addresses: Sequence[str]) -> None:
        """Records that lost hosts have rejoined.

        Args:
            hosts: host number -> IP address.
            addresses: the addresses of all workers.
        """


@dataclass(frozen=True)
class Ended:
    """A failed run of all workers, or of one worker.

    Attributes:
        failure: its first failure.
        seconds: the duration of the run.
    """

    failure: Failure
    seconds: float


@dataclass(frozen=True)
class Restart:
    """The decision to start again after a delay in seconds."""

    delay: float


@dataclass(frozen=True)
class GiveUp:
    """The decision not to start again.

    Attributes:
        reason: the reason, as a clause; "" if restarts were not requested.
    """

    reason: str


def decide(history: Sequence[Ended], limit: int, *, at_once: bool = False) -> Restart | GiveUp:
    """Decides whether to start again after a failure.

    Args:
        history: the failures so far, oldest first.
        limit: the number of restarts allowed.
        at_once: whether the first restart, or a restart after progress, has no delay.

    Example:
        >>> failure = Failure(host=0, subject="worker 1", event="was killed", code=137,
        ...                   rank=1, step=7)
        >>> decide([Ended(failure, 60.0)], 3)
        Restart(delay=1.0)
        >>> decide([Ended(failure, 60.0), Ended(failure, 60.0)], 3)
        GiveUp(reason='it has failed in the same way at the same step before')
    """
    last = history[-1]
    if limit == 0 or last.failure.stopped:
        return GiveUp("")
    if reason := _hopeless(history):
        return GiveUp(reason)
    if any(_same(last, earlier) for earlier in history[:-1]):
        place = "at the same step" if last.failure.step else "before its first step"
        return GiveUp(f"it has failed in the same way {place} before")
    if len(history) > limit:
        return GiveUp(f"--max-restarts {limit} is reached")
    count = _in_vain(history)
    if at_once and not count:
        return Restart(0.0)
    return Restart(min(_FIRST_DELAY * 2.0 ** min(count - at_once, 99), _MAX_DELAY))


def all_saved(failure: Failure, codes: Collection[int]) -> bool:
    """Whether the job was preempted: its workers were asked to stop and have saved their state.

    Args:
        failure: the first failure of the job.
        codes: the exit codes of all its workers, negative for signals.
    """
    return failure.preemption and PREEMPTED in codes and {0, PREEMPTED}.issuperset(codes)


def _hopeless(history: Sequence[Ended]) -> str:
    """Returns why another start would fail like the last one; "" if it may succeed."""
    failure = history[-1].failure
    if failure.rank is None:
        return "a host that is lost cannot be started again from here"
    if failure.status == _USAGE_ERROR:
        return "exit code 2, a usage error, would recur"
    if found := [name for name in failure.classes if name in _HOPELESS]:
        return f"{_a(found[0])} would recur"
    found = [name for name in failure.classes if name in _HOPELESS_AT_FIRST]
    if found and not any(ended.failure.step for ended in history):
        return f"{_a(found[0])} before the first step would recur"
    return ""


def _same(one: Ended, other: Ended) -> bool:
    """Whether two failures are identical at the same step, on any worker."""
    if one.failure.step is None and max(one.seconds, other.seconds) >= _LONG:
        return False  # They trained, for an unknown number of steps.
    return _signature(one.failure) == _signature(other.failure)


def _signature(failure: Failure) -> tuple[object, ...]:
    # Numbers in messages are often ports, process IDs or times.
    message = _NUMBER.sub("#", failure.message)
    return failure.step, failure.status, failure.classes[:1], message


def _in_vain(history: Sequence[Ended]) -> int:
    """Counts the latest restarts that have led to no progress."""
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


def _a(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
