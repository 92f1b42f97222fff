"""Times as many steps as it is told to, and stops the process in between."""

from __future__ import annotations

import time
from typing import Any


class Clock:
    """A worker's end of the driver's pipe: numbers of steps come in, seconds go out.

    Args:
        pipe: a `multiprocessing` connection.
    """

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._await_orders()

    def tick(self, result: Any) -> None:
        """A step has been taken.

        Args:
            result: a scalar that the step gave; reading it waits until the step is done.
        """
        self._left -= 1
        if not self._left:
            float(result)
            self._pipe.send(time.perf_counter() - self._start)
            self._await_orders()

    def _await_orders(self) -> None:
        self._left = self._pipe.recv()
        self._start = time.perf_counter()
