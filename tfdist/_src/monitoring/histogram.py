"""Counts of durations by size."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

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
