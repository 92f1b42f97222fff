"""The training progress of this process: steps, rows, and durations by size."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

from tfdist._src.cluster.session.exit_reason import progress_file
from tfdist._src.progress_file import ProgressFile

# From 1 ms to 1 min; so close that a quantile, which is somewhere between two of them, tells much.
BOUNDS = (
    *(0.001, 0.0015, 0.002, 0.003, 0.005, 0.007),
    *(0.01, 0.015, 0.02, 0.03, 0.05, 0.07),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.7),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.0),
    *(10.0, 15.0, 20.0, 30.0, 60.0),
)


@dataclass
class Histogram:
    """Durations in seconds.

    Attributes:
        counts: of the durations up to each of `BOUNDS` and above the one before; last, above all.
        total: the sum of the durations.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """Counts a duration, `times` times."""
        self.counts[bisect_left(BOUNDS, seconds)] += times
        self.total += seconds * times

    def copy(self) -> Histogram:
        """The counts so far."""
        return Histogram(list(self.counts), self.total)


@dataclass(frozen=True)
class Trained:
    """Counts since the process started.

    Attributes:
        steps: the steps of training, each an update of the weights on a global batch.
        rows: the rows of these steps that this process has had: the sum over the workers is the
            number of rows of the global batches. In a pipeline the worker with the last stage
            counts them.
        all_rows: the rows of their global batches.
        seconds: how long the steps of `fit` have taken.
    """

    steps: int = 0
    rows: int = 0
    all_rows: int = 0
    seconds: Histogram = field(default_factory=Histogram)


class Record:
    """Counts steps as they end.

    Args:
        progress: returns the memory in which the launcher reads the steps, if there is one.

    Attributes:
        recoveries: how often training has gone on here after the loss of a worker.
        keeps_durations: whether anybody asks for the durations of steps; if not, `fit` does not
            tell when its epochs begin.
    """

    def __init__(self, progress: Callable[[], ProgressFile | None] = progress_file) -> None:
        self._progress = progress
        self._earlier = 0
        self.keeps_durations = False
        self.recoveries = 0
        self._lock = threading.Lock()
        self._steps = 0
        self._rows = self._all_rows = 0
        self._seconds = Histogram()
        self._last: float | None = None

    def epoch_begins(self) -> None:
        """From now on, a step lasts until it ends, from the end of the one before."""
        self._last = time.perf_counter()

    def fit_ends(self) -> None:
        """From now on, steps have no known duration."""
        self._last = None

    def add(self, steps: int, rows: int, all_rows: int) -> None:
        """Counts steps that have just ended, with their rows in this process and in all.

        Several that run in one execution count as equally long.
        """
        with self._lock:
            self._steps += steps
            self._rows += rows
            self._all_rows += all_rows
            if self._last is not None:
                now = time.perf_counter()
                self._seconds.observe((now - self._last) / steps, steps)
                self._last = now
            if (file := self._progress()) is not None:
                file.count(self._earlier + self._steps)

    def resumed_at(self, steps: int) -> None:
        """Tells at which step of the job the training continues.

        Only the launcher learns of it, so that it can tell where a job fails that was restarted.

        Args:
            steps: the steps that the restored state has behind it, counted from the job's first
                start.
        """
        with self._lock:
            self._earlier = steps - self._steps
            if (file := self._progress()) is not None:
                file.count(steps)

    def read(self) -> Trained:
        """The counts so far; from any thread."""
        with self._lock:
            return Trained(self._steps, self._rows, self._all_rows, self._seconds.copy())


record = Record()
"""This process's."""
