"""Recorded start and end times of a pipeline's actions."""

from __future__ import annotations

import json

import numpy as np

from tfdist.pipeline.placement.strategy import HybridStrategy
from tfdist.pipeline.simulation.timeline import Span, Timeline


def gather_timeline(strategy: HybridStrategy, microbatches: int, times: np.ndarray) -> Timeline:
    """The timeline of this rank's pipeline; collective over all ranks of the job.

    Args:
        strategy: the pipeline's strategy.
        microbatches: the number of microbatches in the step.
        times: start and end of each of this rank's actions, in order, in seconds of a clock shared
            by all ranks: `[actions, 2]`, float64.
    """
    group, mesh = strategy.extended.group, strategy.extended.mesh
    texts = group.exchange("timeline", json.dumps(np.asarray(times).tolist()))
    own = [json.loads(texts[rank]) for rank in mesh.pipeline_of(group.topology.rank)]
    schedule = strategy.schedule_for(microbatches)
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
