"""How hard to ask the workers to end, and when: a ladder of signals."""

from __future__ import annotations

import signal

# What is sent, in this order, one grace period after the other.
_GENTLE_FIRST = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
# Seconds after SIGKILL that a process may take to vanish (one stuck in a driver never does).
_LAST_WAIT = 10.0


class SignalEscalation:
    """The signals that are due; it holds no clock and sends nothing.

    Args:
        first: SIGINT, SIGTERM or SIGKILL: where to begin.
        grace: seconds from one signal to the next.
        now: the time, in seconds of any clock.

    Example:
        >>> ladder = SignalEscalation(signal.SIGTERM, grace=5.0, now=100.0)
        >>> ladder.due(100.0), ladder.due(102.0), ladder.due(105.0)
        (<Signals.SIGTERM: 15>, None, <Signals.SIGKILL: 9>)
    """

    def __init__(self, first: signal.Signals, grace: float, now: float) -> None:
        self._grace = grace
        self._left = list(_GENTLE_FIRST[_GENTLE_FIRST.index(first) :])
        self.next_time = now

    def due(self, now: float) -> signal.Signals | None:
        """The signal to send now, if it is time for one."""
        if not self._left or now < self.next_time:
            return None
        number = self._left.pop(0)
        self.next_time = now + (self._grace if self._left else _LAST_WAIT)
        return number

    def harden(self, number: signal.Signals, now: float) -> None:
        """Goes on with `number` at once, unless it, or a harder signal, has been sent."""
        if number in self._left:
            self._left = self._left[self._left.index(number) :]
            self.next_time = now

    def exhausted(self, now: float) -> bool:
        """Whether even SIGKILL has not helped."""
        return not self._left and now >= self.next_time
