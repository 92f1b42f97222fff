"""The partition of a model into pipeline stages.

`linearize` turns a model into a list of layer calls, `measure` measures the run time of each call,
`decide` chooses the calls before which to cut, and `cut_model` makes the stages. `partition` runs
all of these functions in one process.
"""

from tfdist._src.pipeline.partition.choose import (
    COSTS,
    boundaries_after,
    check_stages,
    decide,
    partition,
)
from tfdist._src.pipeline.partition.cut import (
    Edge,
    Partition,
    SharedVariable,
    Stage,
    cut_model,
    masks_of,
    pack,
    specs,
    summary,
    unpack,
)
from tfdist._src.pipeline.partition.graph import Call, Graph, Key, Spec
from tfdist._src.pipeline.partition.linearize import linearize
from tfdist._src.pipeline.partition.profiler import CallCost, estimate, measure

__all__ = [
    "COSTS",
    "Call",
    "CallCost",
    "Edge",
    "Graph",
    "Key",
    "Partition",
    "SharedVariable",
    "Spec",
    "Stage",
    "boundaries_after",
    "check_stages",
    "cut_model",
    "decide",
    "estimate",
    "linearize",
    "masks_of",
    "measure",
    "pack",
    "partition",
    "specs",
    "summary",
    "unpack",
]
