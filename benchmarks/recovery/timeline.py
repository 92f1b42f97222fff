"""Computes the cost of a fault from the notes of the workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.recovery.marks import FAILED, STEP, Mark


@dataclass(frozen=True)
class Life:
    """The known events of a worker process.

    Attributes:
        marks: the recorded events in order. The first one is the start of the process.
        ended: the time at which the driver noticed that the process had ended, on the same clock as
            the events; None if the process is running.
    """

    marks: tuple[Mark, ...]
    ended: float | None = None

    @property
    def rank(self) -> int:
        """The initial rank of the worker."""
        return self.marks[0].number

    @property
    def began(self) -> float:
        """The time of the start of the process."""
        return self.marks[0].time

    @property
    def last_step(self) -> int:
        """The number of the last step that the process has completed; 0 before the first step."""
        return next((mark.number for mark in reversed(self.marks) if mark.event == STEP), 0)


@dataclass(frozen=True)
class Recovery:
    """The cost of a fault. All times are in seconds since the signal that caused the fault.

    Attributes:
        detect_s: the time at which one of the other workers first failed in a step or ended; None
            if there is no such worker.
        first_step_s: the end of the first step after the workers detected the fault.
        next_step_s: the end of the first new step: a step with a higher number than all steps
            before the workers detected the fault.
        steps_lost: the number of steps that were trained again.
    """

    detect_s: float | None
    first_step_s: float
    next_step_s: float
    steps_lost: int


def recovery(lives: Mapping[int, Life], victim: int, signalled: float) -> Recovery | None:
    """Returns the cost of a fault. Returns None until a new step has ended.

    A step of a process counts as a step after the fault if the process was started after the
    signal, or if another step of the process has failed since the signal. So if a worker completes
    a step after the signal, but before it detects the fault, this step counts as a step before the
    fault.

    Args:
        lives: the recorded events by process ID.
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
