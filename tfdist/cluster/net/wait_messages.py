"""Says on stderr for whom a worker waits: soon at first, then seldom."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from tfdist.cluster.spec.topology import Worker

FIRST_SECONDS = 3.0
EVERY_SECONDS = 10.0
_NAMED = 8

Announce = Callable[[str], object]


def say(line: str) -> None:
    """Writes a line to stderr, in one piece so that the lines of several workers do not mix."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def named(workers: Sequence[Worker]) -> str:
    """The workers' names, the first few where they are many.

    Example:
        >>> named([Worker("worker", 2, "h2:2222"), Worker("worker", 3, "h3:2222")])
        'worker 2 (h2:2222), worker 3 (h3:2222)'
    """
    text = ", ".join(str(worker) for worker in workers[:_NAMED])
    return f"{text} and {len(workers) - _NAMED} more" if len(workers) > _NAMED else text


class WaitMessages:
    """Announces what is waited for, after 3 seconds and then every 10.

    Args:
        me: who waits.
        timeout: seconds that it will wait.
        announce: takes the lines.
    """

    def __init__(self, me: Worker, timeout: float, announce: Announce) -> None:
        self._me = me
        self._timeout = timeout
        self._announce = announce
        self._start = time.monotonic()
        self._next = self._start + FIRST_SECONDS

    def report(self, waiting: str) -> None:
        """Announces it if the time has come.

        Args:
            waiting: what is waited for.
        """
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + EVERY_SECONDS
        seconds = f"[{now - self._start:.0f} s of {self._timeout:.0f} s]"
        self._announce(f"tfdist: {self._me} waiting for {waiting} {seconds}")
