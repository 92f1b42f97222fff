"""What a fault has cost, from what the workers have noted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.recovery.marks import FAILED, STEP, Mark


@dataclass(frozen=True)
class Life:
    """What is known of a process.

    Attributes:
        marks: in their order; the first is its start.
        ended: when it was found to be gone, on the same clock; None if it runs.
    """

    marks: tuple[Mark, ...]
    ended: float | None = None

    @property
    def rank(self) -> int:
        """With which it has started."""
        return self.marks[0].number

    @property
    def began(self) -> float:
        """When it started."""
        return self.marks[0].time

    @property
    def last_step(self) -> int:
        """The last step that it has noted; 0 before the first."""
        return next((mark.number for mark in reversed(self.marks) if mark.event == STEP), 0)


@dataclass(frozen=True)
class Recovery:
    """What a fault has cost. Seconds count from the signal.

    Attributes:
        detect_s: until a step raises on another worker, or its process ends; None if nothing shows
            that another worker has noticed.
        first_step_s: to the end of the first step after the failure.
        next_step_s: to the end of the first step beyond all that were trained before.
        steps_lost: that were trained again.
    """

    detect_s: float | None
    first_step_s: float
    next_step_s: float
    steps_lost: int


def recovery(lives: Mapping[int, Life], victim: int, signalled: float) -> Recovery | None:
    """What a fault has cost; None as long as there is no step beyond those before it.

    A worker's steps are of the time after the failure once a step of its process has failed, or if
    its process has been started after the signal. So those that others still end after the signal
    are of the time before.

    Args:
        lives: by the processes' numbers.
        victim: the number of the one that got the signal.
        signalled: when.
    """
    noticed: list[float] = []
    before: list[Mark] = []
    after: list[Mark] = []
    for process, life in lives.items():
        turn = life.began
        if process == victim:
            turn = float("inf")
        elif life.began < signalled:
            failures = (m.time for m in life.marks if m.event == FAILED and m.time >= signalled)
            turn = next(failures, float("inf"))
            noticed += [t for t in (turn, life.ended) if t not in (None, float("inf"))]
        for mark in life.marks:
            if mark.event == STEP:
                (before if mark.time < turn else after).append(mark)
    reached = max((mark.number for mark in before), default=0)
    new = [mark.time for mark in after if mark.number > reached]
    if not new:
        return None
    return Recovery(
        detect_s=min(noticed) - signalled if noticed else None,
        first_step_s=min(mark.time for mark in after) - signalled,
        next_step_s=min(new) - signalled,
        steps_lost=len({mark.number for mark in after if mark.number <= reached}),
    )
