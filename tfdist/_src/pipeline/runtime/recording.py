"""Recorded start and end times of a pipeline's actions."""

from __future__ import annotations

import json
from typing import NamedTuple

import numpy as np

from tfdist._src.pipeline.placement.strategy import HybridStrategy
from tfdist._src.pipeline.simulation.timeline import Span, Timeline


class Recorded(NamedTuple):
    """What a step has recorded on a rank.

    Attributes:
        microbatches: the number of microbatches.
        times: start and end of each of the rank's actions, in order, in seconds of Unix time:
            `[actions, 2]`, float64.
    """

    microbatches: int
    times: np.ndarray


def actions_of(strategy: HybridStrategy, recorded: Recorded) -> list[tuple[str, float, float]]:
    """The actions of this rank: name, start and end, in seconds of Unix time."""
    actions = strategy.schedule_for(recorded.microbatches).actions[strategy.pipeline_rank]
    spans = recorded.times.tolist()
    return [(str(action), *span) for action, span in zip(actions, spans, strict=False)]


def gather_timeline(strategy: HybridStrategy, recorded: Recorded) -> Timeline:
    """The timeline of this rank's pipeline; collective over all ranks of the job.

    Args:
        strategy: the pipeline's strategy.
        recorded: of this rank; the ranks' clocks must agree.
    """
    group, mesh = strategy.extended.group, strategy.extended.mesh
    texts = group.exchange("timeline", json.dumps(recorded.times.tolist()))
    own = [json.loads(texts[rank]) for rank in mesh.pipeline_of(group.topology.rank)]
    schedule = strategy.schedule_for(recorded.microbatches)
    begin = min(start for times in own for start, _ in times)
    return Timeline(
        schedule.name,
        tuple(
            tuple(
                Span(action, start - begin, end - begin)
                for action, (start, end) in zip(actions, times, strict=True)
            )
            for actions, times in zip(schedule.actions, own, strict=True)
        ),
    )
