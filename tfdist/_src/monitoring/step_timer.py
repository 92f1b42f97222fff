"""Measures the training steps of this worker, for callbacks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tfdist._src.comm import tracing
from tfdist._src.comm.functions import statistics
from tfdist._src.comm.tracing import Activity
from tfdist._src.monitoring.training import record


class _Moment(NamedTuple):
    time: float
    activity: Activity | None
    sent_bytes: int
    rows: int
    steps: int


@dataclass(frozen=True)
class StepFigures:
    """What some consecutive steps took on this worker. Times are in seconds.

    Attributes:
        steps: the number of steps.
        seconds: their total time.
        times: the time of a step, for each call of the training function, which may run several.
        rows: the rows of their global batches.
        activity: what the native core counted during them; None if it does not run.
        sent_bytes: bytes sent to other hosts.
    """

    steps: int
    seconds: float
    times: Sequence[float]
    rows: int
    activity: Activity | None
    sent_bytes: int

    def quantile(self, q: float) -> float:
        """A quantile of the step time."""
        return float(np.quantile(self.times, q))

    def share(self, seconds: float) -> float:
        """The share of the total time, from 0 to 1."""
        return seconds / self.seconds if self.seconds > 0 else 0.0


@dataclass
class StepTimer:
    """Measures steps from the end of one to the end of the next.

    The first step of a training, which Keras traces, counts only where there is no other; what lies
    between epochs does not count.

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
        """A training begins."""
        self._traced, self._tracing = False, None
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """An epoch begins: time counts from its first step on."""
        self._begin = self._last = None
        self._times = []

    def begin_batch(self) -> None:
        """A call of the training function begins."""
        if self._last is None:
            self._begin = self._last = _moment(0)

    def end_batch(self, batch: int) -> None:
        """A call of the training function has ended.

        Args:
            batch: the index of its last step in the epoch.
        """
        assert self._last is not None
        now = _moment(batch + 1)
        self._times.append((now.time - self._last.time) / max(1, now.steps - self._last.steps))
        self._last = now
        if not self._traced:
            self._traced, self._tracing = True, self.figures()
            self.restart()

    def restart(self) -> None:
        """Counts from the last step's end on."""
        self._begin, self._times = self._last, []

    def figures(self) -> StepFigures | None:
        """The figures since the epoch began, or since `restart`; None without a step."""
        if self._begin is None or self._last is None or not self._times:
            return self._tracing
        return StepFigures(
            self._last.steps - self._begin.steps,
            self._last.time - self._begin.time,
            tuple(self._times),
            self._last.rows - self._begin.rows,
            _between(self._begin.activity, self._last.activity),
            self._last.sent_bytes - self._begin.sent_bytes,
        )


def _moment(steps: int) -> _Moment:
    rows = record.read().all_rows
    return _Moment(time.perf_counter(), tracing.read(), statistics().sent_bytes, rows, steps)


def _between(begin: Activity | None, end: Activity | None) -> Activity | None:
    return None if begin is None or end is None else end.since(begin)
