"""Simulates schedules with measured or given durations of the passes."""

from __future__ import annotations

import os

from benchmarks.pipeline.backends import Entry
from benchmarks.pipeline.team import Times
from tfdist._src.pipeline.plan.schedule import Costs
from tfdist._src.pipeline.schedules import make_schedule
from tfdist._src.pipeline.simulation import Span, Timeline, draw, simulate


def measured(entry: Entry, stages: int, times: Times) -> Timeline:
    """Returns the measured timeline of a pipeline."""
    schedule = make_schedule(entry.schedule, stages, entry.microbatches)
    spans = (
        tuple(Span(action, *span) for action, span in zip(actions, own, strict=True))
        for actions, own in zip(schedule.actions, times, strict=True)
    )
    return Timeline(entry.schedule, tuple(spans))


def resimulated(timeline: Timeline) -> Timeline:
    """Simulates the same schedule with the measured medians of its passes."""
    return simulate(timeline.schedule, timeline.costs())


def padded(entry: Entry, stages: int, pass_ms: float) -> Timeline:
    """Simulates a schedule of stages that wait."""
    seconds = pass_ms / 1e3
    schedule = make_schedule(entry.schedule, stages, entry.microbatches)
    return simulate(schedule, Costs(seconds, seconds, seconds))


def picture(timeline: Timeline, entry: Entry, folder: str) -> None:
    """Draws a timeline, to a file in a folder."""
    os.makedirs(folder, exist_ok=True)
    ranks = len(timeline.spans)
    name = f"{entry.schedule}_{ranks}x{entry.microbatches}.png"
    draw(timeline, os.path.join(folder, name))
