"""Pipeline parallelism: each rank holds a part of the model; microbatches pass through all ranks.

A *rank* is a process of the pipeline. A *stage* is a contiguous part of the model; with virtual
stages, a rank holds several. A *schedule* is pure data: it states the computations of each rank,
and their order. The functions of this module make, check, simulate and draw schedules without
TensorFlow. To train a model in a pipeline, use `tfdist.PipelineStrategy` or
`tfdist.HybridStrategy`, together with `tfdist.PipelineModel`.
"""

from tfdist._src.pipeline.plan.schedule import Action, Costs, Kind, Schedule
from tfdist._src.pipeline.schedules import SCHEDULES, make_schedule
from tfdist._src.pipeline.simulation import Timeline, draw, simulate, text

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Kind",
    "Schedule",
    "Timeline",
    "draw",
    "make_schedule",
    "simulate",
    "text",
]
