"""Times the steps that the driver requests, and lets the worker sleep between requests."""

from __future__ import annotations

import time
from typing import Any


class Clock:
    """Times the steps that the driver requests.

    The driver sends a number of steps through the worker's pipe. After this many steps, the clock
    sends their total time in seconds, and waits for the next number. The constructor waits for the
    first number.

    Args:
        pipe: the `multiprocessing` connection to the driver.
    """

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._await_orders()

    def tick(self, result: Any) -> None:
        """Counts a step. The training loop calls this method after each step.

        Args:
            result: a scalar result of the step. The clock reads the result of the last step to wait
                until this step has ended.
        """
        self._left -= 1
        if not self._left:
            float(result)
            self._pipe.send(time.perf_counter() - self._start)
            self._await_orders()

    def _await_orders(self) -> None:
        self._left = self._pipe.recv()
        self._start = time.perf_counter()
