"""Times the requested numbers of steps, and blocks the process between requests."""

from __future__ import annotations

import time
from typing import Any


class Clock:
    """Receives numbers of steps through a worker's pipe to the driver, and sends seconds.

    Args:
        pipe: a `multiprocessing` connection.
    """

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._await_orders()

    def tick(self, result: Any) -> None:
        """Counts a step that has been taken.

        Args:
            result: a scalar result of the step; reading it waits until the step has ended.
        """
        self._left -= 1
        if not self._left:
            float(result)
            self._pipe.send(time.perf_counter() - self._start)
            self._await_orders()

    def _await_orders(self) -> None:
        self._left = self._pipe.recv()
        self._start = time.perf_counter()
