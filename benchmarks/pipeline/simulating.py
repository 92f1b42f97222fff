"""Simulates the schedules of pipelines, to predict the time of a step without overhead."""

from __future__ import annotations

import os

from benchmarks.pipeline.backends import Entry
from benchmarks.pipeline.team import Times
from tfdist._src.pipeline.plan.schedule import Costs
from tfdist._src.pipeline.schedules import make_schedule
from tfdist._src.pipeline.simulation import Span, Timeline, draw, simulate


def measured(entry: Entry, stages: int, times: Times) -> Timeline:
    """Converts the measured times of a pipeline's actions to a timeline of its schedule."""
    schedule = make_schedule(entry.schedule, stages, entry.microbatches)
    spans = (
        tuple(Span(action, *span) for action, span in zip(actions, own, strict=True))
        for actions, own in zip(schedule.actions, times, strict=True)
    )
    return Timeline(entry.schedule, tuple(spans))


def resimulated(timeline: Timeline) -> Timeline:
    """Simulates the schedule of a measured timeline, with the measured durations of its passes.

    The duration of each kind of pass is the median over the passes in the timeline.
    """
    return simulate(timeline.schedule, timeline.costs())


def padded(entry: Entry, stages: int, pass_ms: float) -> Timeline:
    """Simulates a schedule for stages that wait instead of computing; see `--padded`."""
    seconds = pass_ms / 1e3
    schedule = make_schedule(entry.schedule, stages, entry.microbatches)
    return simulate(schedule, Costs(seconds, seconds, seconds))


def picture(timeline: Timeline, entry: Entry, folder: str) -> None:
    """Draws a timeline, and writes the picture to a file in a folder."""
    os.makedirs(folder, exist_ok=True)
    ranks = len(timeline.spans)
    name = f"{entry.schedule}_{ranks}x{entry.microbatches}.png"
    draw(timeline, os.path.join(folder, name))
