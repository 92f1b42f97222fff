"""Prints progress messages while a worker waits."""

import time
from collections.abc import Callable, Sequence

from tfdist._src.cluster.cluster_spec import Worker

FIRST_SECONDS = 3.0
EVERY_SECONDS = 10.0
NAMED = 8
"""The maximum number of workers that a message names."""

Announce = Callable[[str], object]


def named(workers: Sequence[Worker], count: int | None = None) -> str:
    """Returns a text with the names of the workers. If there are many, only some are named.

    Args:
        workers: the workers, or only some of them.
        count: the total number of workers; by default, the length of `workers`.

    Example:
        >>> named([Worker("worker", 2, "h2:2222"), Worker("worker", 3, "h3:2222")])
        'worker 2 (h2:2222), worker 3 (h3:2222)'
    """
    shown = [str(worker) for worker in workers[:NAMED]]
    more = (len(workers) if count is None else count) - len(shown)
    if not shown:
        return f"{more} workers"
    return f"{', '.join(shown)} and {more} more" if more > 0 else ", ".join(shown)


class WaitMessages:
    """Reports that a worker waits, after 3 seconds and then every 10 seconds.

    Args:
        me: the waiting worker.
        timeout: the number of seconds after which the worker gives up.
        announce: called with each message.
    """

    def __init__(self, me: Worker, timeout: float, announce: Announce) -> None:
        self._me = me
        self._timeout = timeout
        self._announce = announce
        self._start = time.monotonic()
        self._next = self._start + FIRST_SECONDS

    def report(self, waiting: Callable[[], str]) -> None:
        """Calls `announce` if it is time for the next message.

        Args:
            waiting: returns the text that completes "waiting for". It is called only if a message
                is due.
        """
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + EVERY_SECONDS
        seconds = f"[{now - self._start:.0f} s of {self._timeout:.0f} s]"
        self._announce(f"{self._me} waiting for {waiting()} {seconds}")
