"""The variables that a worker holds, under names identical on all workers with a copy."""

from __future__ import annotations

from typing import Any

from tfdist.internals.optimizer import accumulators, updating_optimizers
from tfdist.pipeline.model import PipelineModel
from tfdist.sharding.sharded import sharded_by


def copies_of(model: Any) -> dict[str, Any]:
    """The weights and optimizer variables on this worker of which other workers have copies.

    Left out are accumulated gradients and the slots of a sharded optimizer, which differ between
    replicas.

    Args:
        model: a Keras model; may be a PipelineModel.

    Returns:
        Keras variables by name: workers that use the same name hold copies of the same variable.
    """
    optimizer = getattr(model, "optimizer", None)
    optimizer_variables = _replicated(optimizer) if optimizer else []
    pipeline_rank, numbers = 0, {id(v): i for i, v in enumerate(model.weights)}
    if isinstance(model, PipelineModel):
        pipeline_rank = model.distribute_strategy.pipeline_rank
        numbers = {id(v): i for i, v in enumerate(model.partition.graph.model.variables)}
    return {
        **{f"weight {numbers[id(v)]}": v for v in model.weights},
        **{
            f"pipeline rank {pipeline_rank}, optimizer {i}": v
            for i, v in enumerate(optimizer_variables)
        },
    }


def _replicated(optimizer: Any) -> list[Any]:
    updating = updating_optimizers(optimizer)
    excluded = {id(v) for own in updating for v in accumulators(own)}
    excluded |= {
        id(v) for o in updating if sharded_by(o) is not None for v in o.variables if v.shape
    }
    return [v for v in optimizer.variables if id(v) not in excluded]
