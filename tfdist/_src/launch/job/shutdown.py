"""Receives the signals to the launcher, and chooses the signals with which it stops workers."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

# The signals that ask the launcher to stop. `Signals` also handles SIGCHLD, but SIGCHLD only wakes
# up the launcher, so that it notices the exit of a worker.
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """A context manager with a file descriptor that becomes readable when a signal arrives.

    The signals are SIGCHLD and the signals that ask the launcher to stop: SIGINT, SIGTERM and
    SIGHUP. If this process has ignored one of the last three signals before, the signal stays
    ignored. For example, a process that was started with `nohup` ignores SIGHUP.

    Example:
        >>> with Signals() as signals:
        ...     os.kill(os.getpid(), signal.SIGTERM)
        ...     signals.take()
        [<Signals.SIGTERM: 15>]
    """

    def __enter__(self) -> Signals:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._before_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before: dict[signal.Signals, Any] = {}
        for number in (*_STOPPING, signal.SIGCHLD):
            if number == signal.SIGCHLD or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, _ignore)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._before_wakeup)
        os.close(self._read)
        os.close(self._write)

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable when a signal arrives."""
        return self._read

    def take(self) -> list[signal.Signals]:
        """Returns the signals to stop that have arrived since the last call, in this order."""
        try:
            numbers = os.read(self._read, 4096)
        except BlockingIOError:
            return []
        return [signal.Signals(number) for number in numbers if number in _STOPPING]


def _ignore(number: int, frame: FrameType | None) -> None:
    """Does nothing; Python writes only signals that have a handler to the wakeup descriptor."""


# The signals in the order in which they are sent, one grace period apart.
_GENTLE_FIRST = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
# How many seconds the launcher waits for a worker's exit after SIGKILL. The wait must be limited,
# because a process that is stuck in a driver never exits.
LAST_WAIT = 10.0


# Schedulers such as Slurm and Kubernetes often wait 30 s between SIGTERM and SIGKILL. In this time,
# the workers must save a snapshot, and the launcher must stop the workers and print what happened.
_PREEMPTION_GRACE = 25.0
_GRACE = 5.0


@dataclass(frozen=True)
class Grace:
    """The number of seconds between two signals when the launcher stops a worker.

    Attributes:
        failure: the number of seconds after a failure of a worker, or after Ctrl-C.
        preemption: the number of seconds after the launcher has received SIGTERM. In this time,
            workers may save their state.

    Example:
        >>> Grace.given(None)
        Grace(failure=5.0, preemption=25.0)
    """

    failure: float
    preemption: float

    @classmethod
    def given(cls, seconds: float | None) -> Grace:
        """Returns a `Grace` with `seconds` for both attributes; with the defaults if it is None."""
        if seconds is None:
            return cls(_GRACE, _PREEMPTION_GRACE)
        return cls(seconds, seconds)


class SignalEscalation:
    """Chooses which signal to send to a worker, and when, in order to stop the worker.

    The signals are SIGINT, SIGTERM and SIGKILL, in this order. This class neither sends signals nor
    reads a clock: the caller sends the signals and passes the time.

    Args:
        first: the first signal to send.
        grace: the number of seconds between two signals.
        now: when to send the first signal, in seconds of any clock.

    Example:
        >>> escalation = SignalEscalation(signal.SIGTERM, grace=5.0, now=100.0)
        >>> escalation.due(100.0), escalation.due(102.0), escalation.due(105.0)
        (<Signals.SIGTERM: 15>, None, <Signals.SIGKILL: 9>)
    """

    def __init__(self, first: signal.Signals, grace: float, now: float) -> None:
        self._grace = grace
        self._left = list(_GENTLE_FIRST[_GENTLE_FIRST.index(first) :])
        self.next_time = now

    def due(self, now: float) -> signal.Signals | None:
        """Returns the signal to send now; None if it is not yet time for the next signal."""
        if not self._left or now < self.next_time:
            return None
        number = self._left.pop(0)
        self.next_time = now + (self._grace if self._left else LAST_WAIT)
        return number

    def harden(self, number: signal.Signals, now: float) -> None:
        """Makes the signal `number` due immediately, and skips the signals before it.

        If this signal or a later one in the order has already been sent, nothing changes.
        """
        if number in self._left:
            self._left = self._left[self._left.index(number) :]
            self.next_time = now

    def exhausted(self, now: float) -> bool:
        """Returns whether the worker should have exited by now, because SIGKILL was sent before."""
        return not self._left and now >= self.next_time
