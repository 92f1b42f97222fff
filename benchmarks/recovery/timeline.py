"""Computes the cost of a fault from the workers' notes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.recovery.marks import FAILED, STEP, Mark


@dataclass(frozen=True)
class Life:
    """The known events of a process.

    Attributes:
        marks: the marks in order; the first one is the start.
        ended: the time on the same clock at which the process was found to be gone; None if it
            runs.
    """

    marks: tuple[Mark, ...]
    ended: float | None = None

    @property
    def rank(self) -> int:
        """The rank with which the process started."""
        return self.marks[0].number

    @property
    def began(self) -> float:
        """The time at which the process started."""
        return self.marks[0].time

    @property
    def last_step(self) -> int:
        """The last step that the process has noted; 0 before the first step."""
        return next((mark.number for mark in reversed(self.marks) if mark.event == STEP), 0)


@dataclass(frozen=True)
class Recovery:
    """The cost of a fault. Seconds count from the signal.

    Attributes:
        detect_s: the seconds until a step fails on another worker, or its process ends; None if no
            other worker has shown a reaction.
        first_step_s: the seconds until the end of the first step after the failure.
        next_step_s: the seconds until the end of the first step beyond all earlier steps.
        steps_lost: the number of steps that were trained again.
    """

    detect_s: float | None
    first_step_s: float
    next_step_s: float
    steps_lost: int


def recovery(lives: Mapping[int, Life], victim: int, signalled: float) -> Recovery | None:
    """Returns the cost of a fault; None until a step beyond all earlier steps has ended.

    A step counts as trained after the failure if a step of its process has failed before it, or if
    its process was started after the signal. So steps that other workers end after the signal, but
    before they fail, count as earlier steps.

    Args:
        lives: the lives by process ID.
        victim: the ID of the process that got the signal.
        signalled: the time of the signal.
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
