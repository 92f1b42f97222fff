"""The sequence of signals that stops the workers, from gentle to hard."""

from __future__ import annotations

import signal
from dataclasses import dataclass

# Sent in this order, one grace period apart.
_GENTLE_FIRST = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
# Seconds that a process may take to exit after SIGKILL (one stuck in a driver never does).
LAST_WAIT = 10.0


# What schedulers give after SIGTERM is often 30 s (Slurm, Kubernetes): a snapshot must fit, and the
# launcher must be able to end the workers and say so.
_PREEMPTION_GRACE = 25.0
_GRACE = 5.0


@dataclass(frozen=True)
class Grace:
    """Seconds from one signal to the next, harder one.

    Attributes:
        failure: after a failure, and after Ctrl-C.
        preemption: after SIGTERM to the launcher, in which the workers may save their state.

    Example:
        >>> Grace.given(None)
        Grace(failure=5.0, preemption=25.0)
    """

    failure: float
    preemption: float

    @classmethod
    def given(cls, seconds: float | None) -> Grace:
        """The same for both; the defaults for None."""
        if seconds is None:
            return cls(_GRACE, _PREEMPTION_GRACE)
        return cls(seconds, seconds)


class SignalEscalation:
    """Determines which signal is due; it reads no clock and sends nothing.

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
        """The signal to send now, if any."""
        if not self._left or now < self.next_time:
            return None
        number = self._left.pop(0)
        self.next_time = now + (self._grace if self._left else LAST_WAIT)
        return number

    def harden(self, number: signal.Signals, now: float) -> None:
        """Skips ahead to `number` at once, unless it or a harder signal has been sent."""
        if number in self._left:
            self._left = self._left[self._left.index(number) :]
            self.next_time = now

    def exhausted(self, now: float) -> bool:
        """Whether SIGKILL, too, has had no effect."""
        return not self._left and now >= self.next_time
