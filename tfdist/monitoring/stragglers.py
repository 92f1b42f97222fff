"""Finds the worker that keeps the others waiting, from what all workers have measured."""

from __future__ import annotations

import enum
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# A delay below this share of a step is not worth a line.
_NOTICEABLE = 0.05
# Below this time with data on its way, a link's rate says little.
LEAST_BUSY_SECONDS = 0.001
# Links are compared only where data moves for at least this share of a step.
_MOVES = 0.1


class Cause(enum.Enum):
    """What is slow on a worker."""

    INPUT = "input"
    COMPUTE = "compute"
    NETWORK = "network"


_REMEDIES = {
    Cause.INPUT: "Look at how it reads and prepares its data: its disk, and `prefetch`, "
    "`cache` and `num_parallel_calls` of the dataset.",
    Cause.COMPUTE: "Look for other programs on its host, for throttled cores or clocks, and for "
    "callbacks that only it runs.",
    Cause.NETWORK: "Look at the network of its host.",
}


@dataclass(frozen=True)
class Measurement:
    """A worker's means over some steps. Times are seconds per step.

    Attributes:
        step: the whole step.
        input: waiting for the next batch.
        workers: waiting for other workers.
        network: waiting for data to move.
        best_rate: bytes per second on the fastest of its links to other hosts while something is on
            its way; 0 if it has none, or has sent too little.
        slowest_peer: the worker at the other end of the slowest of its links; -1 for none.
        slowest_rate: bytes per second on that link.
    """

    step: float
    input: float
    workers: float
    network: float
    best_rate: float = 0.0
    slowest_peer: int = -1
    slowest_rate: float = 0.0

    @classmethod
    def with_links(
        cls, step: float, data: float, workers: float, network: float, rates: Mapping[int, float]
    ) -> Measurement:
        """The same, with bytes per second by the rank at the other end of each link."""
        slowest = min(rates, key=rates.__getitem__, default=-1)
        best = max(rates.values(), default=0.0)
        return cls(step, data, workers, network, best, slowest, rates.get(slowest, 0.0))

    @property
    def compute(self) -> float:
        """The rest: the computation, callbacks, and whatever else the process does."""
        return max(0.0, self.step - self.input - self.workers - self.network)


@dataclass(frozen=True)
class Straggler:
    """A worker that keeps the others waiting.

    Attributes:
        rank: its rank.
        cause: what is slow.
        own: its own value: seconds per step, or bytes per second for the network.
        others: the median of the other workers.
    """

    rank: int
    cause: Cause
    own: float
    others: float


def find(measured: Sequence[Measurement], factor: float) -> Straggler | None:
    """Finds the worker that keeps the others waiting.

    A worker's own time is what remains of its step without its waiting for other workers and for
    data: it is longest on the worker that the others wait for, while the step is equally long on
    all. If no own time stands out, links are compared: the worker whose fastest link is slow, or to
    which the links of all others are.

    Args:
        measured: of each worker, by rank.
        factor: how many times the median of the others counts as slow.

    Example:
        >>> fast, slow = Measurement(0.1, 0.0, 0.06, 0.01), Measurement(0.1, 0.06, 0.0, 0.01)
        >>> find([fast, slow, fast], factor=1.3).cause
        <Cause.INPUT: 'input'>
    """
    return find_slow_process(measured, factor) or find_slow_link(measured, factor)


def describe(straggler: Straggler) -> str:
    """What a straggler does to the others, and where to look, as the end of a sentence."""
    if straggler.cause is Cause.NETWORK:
        what = (
            f"its connections to other hosts carry {straggler.own / 1e6:.3g} MB/s while they send, "
            f"where the median of the others is {straggler.others / 1e6:.3g} MB/s"
        )
    else:
        kind = "input" if straggler.cause is Cause.INPUT else "computation"
        what = (
            f"its {kind} takes {1e3 * straggler.own:.1f} ms of a step, where the median of the "
            f"others is {1e3 * straggler.others:.1f} ms"
        )
    return f"keeps the others waiting: {what}. {_REMEDIES[straggler.cause]}"


def find_slow_process(measured: Sequence[Measurement], factor: float) -> Straggler | None:
    """Of `find`, the comparison of the workers' own times."""
    if len(measured) < 2:
        return None
    own = [m.input + m.compute for m in measured]
    rank = max(range(len(own)), key=own.__getitem__)
    usual = _median_of_others(own, rank)
    slowest = measured[rank]
    if own[rank] < factor * usual or own[rank] - usual < _NOTICEABLE * slowest.step:
        return None
    by_cause = {
        Cause.INPUT: [m.input for m in measured],
        Cause.COMPUTE: [m.compute for m in measured],
    }
    cause = max(by_cause, key=lambda c: by_cause[c][rank] - _median_of_others(by_cause[c], rank))
    values = by_cause[cause]
    return Straggler(rank, cause, values[rank], _median_of_others(values, rank))


def find_slow_link(measured: Sequence[Measurement], factor: float) -> Straggler | None:
    """Of `find`, the comparison of links."""
    linked = [rank for rank, m in enumerate(measured) if m.best_rate > 0]
    if len(linked) < 2 or max(m.network / m.step for m in measured if m.step > 0) < _MOVES:
        return None
    rank = min(linked, key=lambda r: measured[r].best_rate)
    usual = statistics.median_low(measured[r].best_rate for r in linked if r != rank)
    if factor * measured[rank].best_rate < usual:
        return Straggler(rank, Cause.NETWORK, measured[rank].best_rate, usual)
    accused = {measured[r].slowest_peer for r in linked}
    for rank in sorted(accused - {-1}):
        accusers = [r for r in linked if r != rank]
        if len(accusers) > 1 and all(_accuses(measured[r], rank, factor) for r in accusers):
            rate = statistics.median(measured[r].slowest_rate for r in accusers)
            usual = statistics.median(measured[r].best_rate for r in accusers)
            return Straggler(rank, Cause.NETWORK, rate, usual)
    return None


def _accuses(measurement: Measurement, rank: int, factor: float) -> bool:
    slow = factor * measurement.slowest_rate < measurement.best_rate
    return measurement.slowest_peer == rank and slow


def _median_of_others(values: Sequence[float], rank: int) -> float:
    return statistics.median_high(value for r, value in enumerate(values) if r != rank)
