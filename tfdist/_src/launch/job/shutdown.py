"""Signals to the launcher, and the sequence of signals that stops the workers."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

# The signals that ask the launcher to stop. SIGCHLD is also handled, but only wakes it up.
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """A context manager with a file descriptor that becomes readable when a signal arrives.

    A stopping signal stays ignored if this process ignored it before, as `nohup` does with SIGHUP.

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
        """The descriptor to wait on."""
        return self._read

    def take(self) -> list[signal.Signals]:
        """Returns the stopping signals received since the last call, in order."""
        try:
            numbers = os.read(self._read, 4096)
        except BlockingIOError:
            return []
        return [signal.Signals(number) for number in numbers if number in _STOPPING]


def _ignore(number: int, frame: FrameType | None) -> None:
    """Does nothing: Python writes the number to the wakeup descriptor."""


# The signals in the order of sending, one grace period apart.
_GENTLE_FIRST = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
# Seconds allowed for an exit after SIGKILL (a process stuck in a driver never exits).
LAST_WAIT = 10.0


# Schedulers such as Slurm and Kubernetes often allow 30 s after SIGTERM. In this time, the workers
# must save a snapshot, and the launcher must end the workers and report it.
_PREEMPTION_GRACE = 25.0
_GRACE = 5.0


@dataclass(frozen=True)
class Grace:
    """Seconds between signals of increasing force.

    Attributes:
        failure: the seconds after a failure, and after Ctrl-C.
        preemption: the seconds after SIGTERM to the launcher; workers may save their state.

    Example:
        >>> Grace.given(None)
        Grace(failure=5.0, preemption=25.0)
    """

    failure: float
    preemption: float

    @classmethod
    def given(cls, seconds: float | None) -> Grace:
        """Returns the given seconds for both, or the defaults for None."""
        if seconds is None:
            return cls(_GRACE, _PREEMPTION_GRACE)
        return cls(seconds, seconds)


class SignalEscalation:
    """Determines the signal that is due, without reading a clock or sending anything.

    Args:
        first: the first signal: SIGINT, SIGTERM or SIGKILL.
        grace: seconds from one signal to the next.
        now: the current time, in seconds of any clock.

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
        """Returns the signal to send now, if any."""
        if not self._left or now < self.next_time:
            return None
        number = self._left.pop(0)
        self.next_time = now + (self._grace if self._left else LAST_WAIT)
        return number

    def harden(self, number: signal.Signals, now: float) -> None:
        """Makes `number` due immediately, unless it or a harder signal has been sent."""
        if number in self._left:
            self._left = self._left[self._left.index(number) :]
            self.next_time = now

    def exhausted(self, now: float) -> bool:
        """Whether the time allowed for an exit after SIGKILL has passed."""
        return not self._left and now >= self.next_time
