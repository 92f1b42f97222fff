"""What has become of the workers of an elastic job, in numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True)
class WorkerCounts:
    """How many workers of a host, or of the job, are in which state.

    Attributes:
        members: running from the start, or replacements that train.
        joining: replacements that have not trained yet.
        waiting: replacements that start after a while.
        completed: those that ended with 0.
        left: those that have saved their state on request and ended with 75.
        lost: those that failed and are not replaced.

    Example:
        >>> WorkerCounts(members=2) + WorkerCounts(joining=1, lost=1)
        WorkerCounts(members=2, joining=1, waiting=0, completed=0, left=0, lost=1)
    """

    members: int = 0
    joining: int = 0
    waiting: int = 0
    completed: int = 0
    left: int = 0
    lost: int = 0

    def __post_init__(self) -> None:
        if min(asdict(self).values()) < 0:
            raise ValueError("numbers of workers must not be negative")

    def __add__(self, other: WorkerCounts) -> WorkerCounts:
        return WorkerCounts(**{name: asdict(self)[name] + n for name, n in asdict(other).items()})

    @property
    def ended(self) -> bool:
        """Whether nothing runs any more, or is to run."""
        return not (self.members or self.joining or self.waiting)

    @property
    def over(self) -> bool:
        """Whether the training has ended: a worker that has not joined by now has no use."""
        return self.completed + self.left > 0 and not self.members

    @property
    def gone(self) -> WorkerCounts:
        """The same after the loss of the host."""
        lost = self.members + self.joining + self.waiting + self.lost
        return replace(self, members=0, joining=0, waiting=0, lost=lost)


def total(counts: Iterable[WorkerCounts]) -> WorkerCounts:
    """The sum.

    Example:
        >>> total([WorkerCounts(members=2), WorkerCounts(members=1)]).members
        3
    """
    return sum(counts, WorkerCounts())
