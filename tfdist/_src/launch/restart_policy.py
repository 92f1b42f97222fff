"""The common interface of the restart policies, and the rules for restarts after a failure.

A restart policy decides how the launcher reacts to events such as the exit of a worker. It receives
the events and returns actions, which `supervisor.py` executes. The policy itself uses no processes,
sockets or clocks, so that it can be tested without them. The policies are:

- "none", `RestartAll` with a limit of 0: a failure stops all workers.
- "all", `RestartAll`: a failure stops all workers, and they start again together.
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
# The number of seconds before the first restart. It doubles after each failure without progress.
_FIRST_DELAY = 1.0
_MAX_DELAY = 60.0
# A run of at least this number of seconds counts as progress even if it has not reported any step.
# A custom training loop, for example, does not report its steps.
_LONG = 600.0
_USAGE_ERROR = 2
# After these errors, the job is not restarted. Their causes are mistakes in the program, missing
# packages or a rejected configuration, so a restart would fail in the same way.
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
# Before the first completed step, the causes of these errors are mistakes in the program or its
# arguments. A restart would fail in the same way. After the first step, the cause may be a part of
# the data or a damaged file. Then the job ends only if it fails again at the same step.
_HOPELESS_AT_FIRST = frozenset({"ValueError", "TypeError", "NameError", "AttributeError"})
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True)
class Begin:
    """The action to begin a new generation of workers.

    The workers that start afterwards belong to the generation. They have their own folder for log
    files, and their own secret. Host 0 also sends this object to the other hosts, as a message.

    Attributes:
        generation: the number of the generation.
        secret: the secret of the generation's workers; "" to keep the current secret.
    """

    generation: int
    secret: str = field(default="", repr=False)


@dataclass(frozen=True)
class Start:
    """The action to start a worker.

    If the worker is a replacement and cannot be started, the supervisor calls `unavailable`. If any
    other worker cannot be started, the command ends.

    Attributes:
        rank: the rank of the worker.
        replacement: a text such as `"replacement 1 of 3"` if the worker replaces a failed worker;
            otherwise "".
    """

    rank: int
    replacement: str = ""


@dataclass(frozen=True)
class Stop:
    """The action to stop workers by signals: SIGINT, SIGTERM and SIGKILL, until the workers exit.

    Attributes:
        ranks: the ranks of the workers.
        first: the first of these signals to send.
        grace: the number of seconds between two signals.
        at: when to send the first signal.
    """

    ranks: tuple[int, ...]
    first: signal.Signals
    grace: float
    at: float


@dataclass(frozen=True)
class EscalateSignal:
    """The action to send a harder signal to the workers that are being stopped.

    The signal is sent immediately. A worker does not receive it if this signal or a later one in
    the order SIGINT, SIGTERM, SIGKILL was already sent to the worker.

    Attributes:
        signal: the signal.
    """

    signal: signal.Signals


@dataclass(frozen=True)
class Send:
    """The action to send a message to the connected hosts.

    Host 0 is connected to all other hosts. Any other host is connected only to host 0.

    Attributes:
        kind: the kind of message.
        value: the content of the message: a dataclass, or a value that JSON can represent.
    """

    kind: str
    value: object = None


@dataclass(frozen=True)
class PrintMessage:
    """The action to print a message.

    Attributes:
        text: the message.
        below_output: whether the last line in the terminal may be an unfinished line of a worker.
            Then the message begins on a new line.
        level: the log level of the message.
    """

    text: str
    below_output: bool = True
    level: int = logging.INFO


@dataclass(frozen=True)
class PrintFailure:
    """The action to print a failure, with the last lines of the failed worker's output.

    If workers have written flight logs, the command that explains these logs is also printed.

    Attributes:
        failure: the failure; None to print only the command.
    """

    failure: Failure | None


@dataclass(frozen=True)
class End:
    """The action to end the `tfdist run` command.

    Attributes:
        code: the exit code of the command.
        summary: the last message of the command; "" if it prints no such message.
    """

    code: int
    summary: str = ""


Action = Begin | Start | Stop | EscalateSignal | Send | PrintMessage | PrintFailure | End


class RestartPolicy:
    """Decides, together with the other hosts, when to start and stop the workers of one host.

    The supervisor calls a method for each event, and `advance` regularly. Then it executes the
    actions that `take` returns. The policy does not read a clock: all times are in seconds of the
    caller's clock.

    Args:
        ranks: the ranks of this host's workers, which start immediately.
        host: this host's number.
        hosts: the numbers of the other hosts that are connected to this host. For host 0, these are
            all other hosts; for any other host, this is only host 0.
        grace: how long to wait between two signals when workers are stopped.

    Attributes:
        addresses: the addresses of all workers, in rank order, if they have changed since the
            start; otherwise empty.
        next_look: when the supervisor should next call `suspended`; None if it need not call it.
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
        """Returns the actions that have been added since the last call, in this order."""
        actions, self._actions = self._actions, []
        return actions

    def _do(self, *actions: Action) -> None:
        self._actions += actions

    def _stop_workers(
        self, first: signal.Signals, stop: Failure | None, at: float, ranks: Collection[int]
    ) -> None:
        """Adds an action that stops workers.

        Args:
            first: the first signal to send.
            stop: the reason to stop. If it is a preemption, the workers have time to save their
                state.
            at: when to send the first signal.
            ranks: the ranks of the workers.
        """
        saves = stop is not None and stop.preemption
        grace = self._grace.preemption if saves else self._grace.failure
        if ranks:
            self._do(Stop(tuple(sorted(ranks)), first, grace, at))

    @property
    def next_time(self) -> float | None:
        """When `advance` must be called even if no event occurs; None if this is not necessary."""
        raise NotImplementedError

    @property
    def has_failed(self) -> bool:
        """Whether any failure has occurred so far. If so, the temporary log files are kept."""
        raise NotImplementedError

    def exited(self, rank: int, failure: Failure | None, now: float, stuck: str = "") -> None:
        """Handles the exit of a worker.

        Args:
            rank: the worker's rank.
            failure: the worker's failure; None if the worker's exit code was 0.
            now: the current time.
            stuck: a text with the worker's rank and process ID if the worker is still running after
                SIGKILL, so that the launcher no longer waits for its exit; otherwise "".
        """
        raise NotImplementedError

    def signaled(self, number: signal.Signals, stop: Failure, now: float) -> None:
        """Handles a signal that asks this command to stop; `stop` describes it as a failure."""
        raise NotImplementedError

    def received(self, host: int, kind: str, value: object, now: float) -> None:
        """Handles a message from another host.

        Raises:
            ValueError: the message is not valid.
        """
        raise NotImplementedError

    def lost(self, host: int, failure: Failure, now: float) -> None:
        """Handles the loss of the connection to another host."""
        raise NotImplementedError

    def advance(self, now: float) -> None:
        """Decides what to do because of recent events, or because time has passed."""
        raise NotImplementedError

    # The methods below are for policies that replace single workers.

    @property
    def joining(self) -> Collection[int]:
        """The ranks of the replacements that have not completed a step so far.

        When one of them completes its first step, the supervisor calls `trained`.
        """
        return ()

    @property
    def wants_spares(self) -> bool:
        """Whether the launcher should keep spares, because a replacement may still be needed."""
        return False

    @property
    def is_over(self) -> bool:
        """Whether the job is ending, so that hosts can no longer join it."""
        return True

    def trained(self, rank: int) -> None:
        """Tells the policy that a replacement has completed its first step."""

    def unavailable(self, rank: int, why: str) -> None:
        """Tells the policy that a replacement could not be started; `why` is the reason."""

    def suspended(self, ranks: Collection[int], now: float) -> None:
        """Tells the policy which workers of this host are currently suspended (SIGSTOP)."""

    def admitted(self, hosts: Mapping[int, str], addresses: Sequence[str]) -> None:
        """Tells the policy that lost hosts have rejoined the job.

        Args:
            hosts: maps the number of each of these hosts to its IP address.
            addresses: the addresses of all workers, in rank order.
        """


@dataclass(frozen=True)
class Ended:
    """A run that has failed: a run of all workers, or of a single worker that may be replaced.

    Attributes:
        failure: the first failure in the run.
        seconds: the duration of the run.
    """

    failure: Failure
    seconds: float


@dataclass(frozen=True)
class Restart:
    """The decision to start again.

    Attributes:
        delay: the number of seconds until the start.
    """

    delay: float


@dataclass(frozen=True)
class GiveUp:
    """The decision not to start again.

    Attributes:
        reason: the reason, as a clause; "" if the user has not requested restarts.
    """

    reason: str


def decide(history: Sequence[Ended], limit: int, *, at_once: bool = False) -> Restart | GiveUp:
    """Decides whether to start again after a failure.

    Args:
        history: the failed runs so far, oldest first.
        limit: the maximum number of restarts.
        at_once: whether to restart without delay after the first failure, and after a run that has
            made progress.

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
    """Returns whether the workers were asked to stop and have all saved their state.

    Args:
        failure: the first failure of the job.
        codes: the exit codes of all workers; negative numbers of signals for killed workers.
    """
    return failure.preemption and PREEMPTED in codes and {0, PREEMPTED}.issuperset(codes)


def _hopeless(history: Sequence[Ended]) -> str:
    """Returns why a restart would certainly fail again; "" if it may succeed."""
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
    """Returns whether two runs have failed in the same way and at the same step, on any worker."""
    # A long run without a known step has probably made progress, so its step is not the same.
    if one.failure.step is None and max(one.seconds, other.seconds) >= _LONG:
        return False
    return _signature(one.failure) == _signature(other.failure)


def _signature(failure: Failure) -> tuple[object, ...]:
    # Ignore numbers in messages. They are often ports, process IDs or times, which change.
    message = _NUMBER.sub("#", failure.message)
    return failure.step, failure.status, failure.classes[:1], message


def _in_vain(history: Sequence[Ended]) -> int:
    """Returns the number of restarts since the last run that has made progress."""
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
