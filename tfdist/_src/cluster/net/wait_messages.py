"""Messages about a worker's wait: the first one soon, then less often."""

import time
from collections.abc import Callable, Sequence

from tfdist._src.cluster.cluster_spec import Worker

FIRST_SECONDS = 3.0
EVERY_SECONDS = 10.0
NAMED = 8
"""The maximum number of workers that a message names."""

Announce = Callable[[str], object]


def named(workers: Sequence[Worker], count: int | None = None) -> str:
    """Returns the workers' names; only the first few if there are many.

    Args:
        workers: some or all of the workers.
        count: the number of all workers; the length of `workers` by default.

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
    """Reports a worker's wait, after 3 seconds and then every 10 seconds.

    Args:
        me: the waiting worker.
        timeout: seconds that it will wait.
        announce: called with each line.
    """

    def __init__(self, me: Worker, timeout: float, announce: Announce) -> None:
        self._me = me
        self._timeout = timeout
        self._announce = announce
        self._start = time.monotonic()
        self._next = self._start + FIRST_SECONDS

    def report(self, waiting: Callable[[], str]) -> None:
        """Reports the wait if a report is due.

        Args:
            waiting: returns a description of the wait; only called for a report.
        """
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + EVERY_SECONDS
        seconds = f"[{now - self._start:.0f} s of {self._timeout:.0f} s]"
        self._announce(f"{self._me} waiting for {waiting()} {seconds}")
