"""The times at which the actions of a pipeline ran, or would run."""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass
from statistics import median

from tfdist._src.pipeline.plan.action import Action, Kind
from tfdist._src.pipeline.plan.costs import Costs
from tfdist._src.pipeline.plan.schedule import Schedule
from tfdist._src.pipeline.plan.validation import peak_activations


@dataclass(frozen=True)
class Span:
    """One action, and when it ran.

    Attributes:
        action: the action.
        start: its start, in seconds since the start of the step.
        end: its end, likewise.
    """

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The actions of every rank with their times, simulated or measured.

    Attributes:
        name: the schedule's name.
        spans: for each rank, its actions in order. Times are in seconds, start at 0 and share one
            clock on all ranks.

    Example:
        >>> timeline = simulate(make_schedule("gpipe", ranks=2, microbatches=6))
        >>> timeline.makespan, round(timeline.bubble, 3)
        (21.0, 0.143)
    """

    name: str
    spans: tuple[tuple[Span, ...], ...]

    @functools.cached_property
    def makespan(self) -> float:
        """The seconds until the last action of any rank ends."""
        return max((span.end for spans in self.spans for span in spans), default=0.0)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """For each rank, the fraction of the makespan in which it runs no action."""
        whole = self.makespan
        busy = (sum(span.end - span.start for span in spans) for spans in self.spans)
        return tuple(1 - seconds / whole if whole else 0.0 for seconds in busy)

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time, up to the makespan, in which they run no action."""
        return sum(self.bubbles) / len(self.spans)

    @functools.cached_property
    def schedule(self) -> Schedule:
        """The actions without their times."""
        return Schedule(self.name, tuple(tuple(s.action for s in spans) for spans in self.spans))

    def costs(self) -> Costs:
        """The costs of each stage's passes: the medians over the microbatches.

        Example:
            >>> simulate(make_schedule("1f1b", ranks=2, microbatches=6)).costs().backward
            (2.0, 2.0)
        """
        seconds: dict[tuple[Kind, int], list[float]] = defaultdict(list)
        for span in (span for spans in self.spans for span in spans):
            seconds[span.action.kind, span.action.stage].append(span.end - span.start)
        stages = range(self.schedule.stages)

        def each(kind: Kind) -> tuple[float, ...]:
            return tuple(median(seconds.get((kind, stage), [0.0])) for stage in stages)

        inputs, weights = each(Kind.INPUT_GRADIENT), each(Kind.WEIGHT_GRADIENT)
        whole = each(Kind.BACKWARD) if any(each(Kind.BACKWARD)) else None
        return Costs(each(Kind.FORWARD), inputs, weights, whole)

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """For each rank, the peak number of activations that it keeps."""
        return peak_activations(self.schedule)
