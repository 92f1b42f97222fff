"""When each action of a pipeline ran, or would run."""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass
from statistics import median

from tfdist.pipeline.plan.action import Action, Kind
from tfdist.pipeline.plan.costs import Costs
from tfdist.pipeline.plan.schedule import Schedule
from tfdist.pipeline.plan.validation import peak_activations


@dataclass(frozen=True)
class Span:
    """One action, and when it ran.

    Attributes:
        action: what ran.
        start: seconds since the begin of the step.
        end: the same, of its end.
    """

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The actions of every rank with their times, simulated or measured.

    Attributes:
        name: the schedule's name.
        spans: for each rank, its actions in their order. Times are seconds from 0 on, by one clock
            for all ranks.

    Example:
        >>> timeline = simulate(make_schedule("gpipe", ranks=2, microbatches=6))
        >>> timeline.makespan, round(timeline.bubble, 3)
        (21.0, 0.143)
    """

    name: str
    spans: tuple[tuple[Span, ...], ...]

    @functools.cached_property
    def makespan(self) -> float:
        """The seconds until the last action of any rank has ended."""
        return max((span.end for own in self.spans for span in own), default=0.0)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """For each rank, the share of the makespan in which it runs no action."""
        whole = self.makespan
        busy = (sum(span.end - span.start for span in own) for own in self.spans)
        return tuple(1 - seconds / whole if whole else 0.0 for seconds in busy)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time, each until the makespan, in which they run no action."""
        return sum(self.bubbles) / len(self.spans)

    @functools.cached_property
    def schedule(self) -> Schedule:
        """The order without the times."""
        return Schedule(self.name, tuple(tuple(s.action for s in own) for own in self.spans))

    def costs(self) -> Costs:
        """What the passes of each stage took: the medians over the microbatches.

        Example:
            >>> simulate(make_schedule("1f1b", ranks=2, microbatches=6)).costs().backward
            (2.0, 2.0)
        """
        seconds: dict[tuple[Kind, int], list[float]] = defaultdict(list)
        for span in (span for own in self.spans for span in own):
            seconds[span.action.kind, span.action.stage].append(span.end - span.start)
        stages = range(self.schedule.stages)

        def each(kind: Kind) -> tuple[float, ...]:
            return tuple(median(seconds.get((kind, stage), [0.0])) for stage in stages)

        inputs, weights = each(Kind.INPUT_GRADIENT), each(Kind.WEIGHT_GRADIENT)
        whole = each(Kind.BACKWARD) if any(each(Kind.BACKWARD)) else None
        return Costs(each(Kind.FORWARD), inputs, weights, whole)

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """For each rank, the activations that it keeps at most."""
        return peak_activations(self.schedule)
