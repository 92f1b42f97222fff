"""The training progress of this process: steps, rows and durations."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tfdist._src.cluster.session.exit_reason import progress_file
from tfdist._src.comm import tracing
from tfdist._src.comm.functions import statistics
from tfdist._src.comm.tracing import Activity
from tfdist._src.progress_file import ProgressFile

# From 1 ms to 1 min, closely spaced, because a quantile is only known to be between two bounds.
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
        counts: for each bound in `BOUNDS`, the number of durations that are above the previous
            bound and not above this bound. The last element counts the durations above all bounds.
        total: the sum of the durations.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """Counts a duration the given number of times."""
        self.counts[bisect_left(BOUNDS, seconds)] += times
        self.total += seconds * times

    def copy(self) -> Histogram:
        """Returns a copy of the counts so far."""
        return Histogram(list(self.counts), self.total)


@dataclass(frozen=True)
class Trained:
    """Counts since the process started.

    Attributes:
        steps: the number of training steps. A step updates the weights with a global batch.
        rows: the rows of these steps that this process has trained. The sum over all workers is the
            number of rows of the global batches. In a pipeline, only the worker with the last stage
            counts the rows.
        all_rows: the number of rows of the global batches in these steps.
        seconds: the durations of the steps of `fit`.
    """

    steps: int = 0
    rows: int = 0
    all_rows: int = 0
    seconds: Histogram = field(default_factory=Histogram)


class Record:
    """Counts steps as they end.

    Args:
        progress: a function that returns the memory that the launcher reads, or None without a
            launcher.

    Attributes:
        recoveries: the number of times that training has continued in this process after the loss
            of a worker.
        keeps_durations: whether the durations of steps are needed. If not, `fit` does not report
            when its epochs begin.
        preprocessing: a function that returns two counts since the process started: the rows of
            the batches of datasets whose preprocessing is divided among the workers, and the rows
            of these datasets that this worker has preprocessed. Any thread may call it.
    """

    def __init__(self, progress: Callable[[], ProgressFile | None] = progress_file) -> None:
        self._progress = progress
        self._earlier = 0
        self.keeps_durations = False
        self.recoveries = 0
        self.preprocessing: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._lock = threading.Lock()
        self._steps = 0
        self._rows = self._all_rows = 0
        self._seconds = Histogram()
        self._last: float | None = None

    def epoch_begins(self) -> None:
        """Starts measuring. A step's duration is the time since the end of the previous step."""
        self._last = time.perf_counter()

    def fit_ends(self) -> None:
        """Stops measuring, so that later steps are counted without a duration."""
        self._last = None

    def add(self, steps: int, rows: int, all_rows: int) -> None:
        """Counts steps that have just ended, with their rows in this process and on all workers.

        If several steps run in one execution, they count as equally long.
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
        """Records the step of the job at which training continues.

        The launcher reads this number, and reports it if the restarted job fails.

        Args:
            steps: the number of steps in the restored state, counted from the job's first start.
        """
        with self._lock:
            self._earlier = steps - self._steps
            if (file := self._progress()) is not None:
                file.count(steps)

    def read(self) -> Trained:
        """Returns the counts so far; may be called from any thread."""
        with self._lock:
            return Trained(self._steps, self._rows, self._all_rows, self._seconds.copy())


record = Record()
"""The record of this process."""


class _Moment(NamedTuple):
    time: float
    activity: Activity | None
    sent_bytes: int
    rows: int
    steps: int
    divided: int
    preprocessed: int


@dataclass(frozen=True)
class StepFigures:
    """Measurements of consecutive steps on this worker. Times are in seconds.

    Attributes:
        steps: the number of steps.
        seconds: the total time of these steps.
        times: the time per step, for each call of the training function. A call may run several
            steps.
        rows: the number of rows in the global batches of these steps.
        activity: the counts of the native core during these steps; None if the core does not run.
        sent_bytes: the bytes sent to other hosts during these steps.
        preprocessed: this worker's share of the preprocessing during these steps, from 0 to 1; None
            if the preprocessing of the data is not divided among the workers.
    """

    steps: int
    seconds: float
    times: Sequence[float]
    rows: int
    activity: Activity | None
    sent_bytes: int
    preprocessed: float | None = None

    def quantile(self, q: float) -> float:
        """Returns a quantile of the time per step."""
        return float(np.quantile(self.times, q))

    def share(self, seconds: float) -> float:
        """Returns the given time as a share of the total time, from 0 to 1."""
        return seconds / self.seconds if self.seconds > 0 else 0.0


@dataclass
class StepTimer:
    """Measures each step from the end of the previous step to the end of this step.

    Keras traces the first step of a training run, so this step counts only if there is no other
    step. The time between epochs does not count.

    Example:
        >>> timer = StepTimer()
        >>> timer.begin_training()
        >>> for batch in range(3):
        ...     timer.begin_batch()
        ...     timer.end_batch(batch)
        >>> timer.figures().steps
        2
    """

    _traced: bool = False
    _begin: _Moment | None = None
    _last: _Moment | None = None
    _times: list[float] = field(default_factory=list)
    _tracing: StepFigures | None = None

    def begin_training(self) -> None:
        """Records the beginning of a training run."""
        self._traced, self._tracing = False, None
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Records the beginning of an epoch; the time of the epoch counts from its first step."""
        self._begin = self._last = None
        self._times = []

    def begin_batch(self) -> None:
        """Records the beginning of a call of the training function."""
        if self._last is None:
            self._begin = self._last = _moment(0)

    def end_batch(self, batch: int) -> None:
        """Records the end of a call of the training function.

        Args:
            batch: the index, in the epoch, of the last step that this call has run.
        """
        assert self._last is not None
        now = _moment(batch + 1)
        self._times.append((now.time - self._last.time) / max(1, now.steps - self._last.steps))
        self._last = now
        if not self._traced:
            self._traced, self._tracing = True, self.figures()
            self.restart()

    def restart(self) -> None:
        """Discards the figures so far, so that later figures begin at the end of the last step."""
        self._begin, self._times = self._last, []

    def figures(self) -> StepFigures | None:
        """Returns the figures since the epoch began, or since `restart`. None without a step."""
        if self._begin is None or self._last is None or not self._times:
            return self._tracing
        return StepFigures(
            self._last.steps - self._begin.steps,
            self._last.time - self._begin.time,
            tuple(self._times),
            self._last.rows - self._begin.rows,
            _between(self._begin.activity, self._last.activity),
            self._last.sent_bytes - self._begin.sent_bytes,
            _share(
                self._last.preprocessed - self._begin.preprocessed,
                self._last.divided - self._begin.divided,
            ),
        )


def _moment(steps: int) -> _Moment:
    rows = record.read().all_rows
    sent = statistics().sent_bytes
    return _Moment(time.perf_counter(), tracing.read(), sent, rows, steps, *record.preprocessing())


def _share(part: int, whole: int) -> float | None:
    # A pipeline preprocesses rows before they are read.
    return min(1.0, part / whole) if whole else None


def _between(begin: Activity | None, end: Activity | None) -> Activity | None:
    return None if begin is None or end is None else end.since(begin)
