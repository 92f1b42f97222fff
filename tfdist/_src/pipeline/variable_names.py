"""The variables that a worker holds, under names identical on all workers with a copy."""

from __future__ import annotations

from typing import Any

from tfdist._src.keras.optimizers import applying
from tfdist._src.pipeline.model import PipelineModel


def copies_of(model: Any) -> dict[str, Any]:
    """The weights and optimizer variables on this worker of which other workers have copies.

    Args:
        model: a Keras model; may be a PipelineModel.

    Returns:
        Keras variables by name: workers that use the same name hold copies of the same variable.
    """
    if not isinstance(model, PipelineModel):
        return applying.replicated_variables(model)
    pipeline_rank = model.distribute_strategy.pipeline_rank
    numbers = {id(v): i for i, v in enumerate(model.partition.graph.model.variables)}
    found = {f"weight {numbers[id(v)]}": v for v in model.weights}
    for name, optimizer in applying.optimizers_of(model).items():
        for i, variable in enumerate(applying.replicated_state(optimizer)):
            found[f"pipeline rank {pipeline_rank}, {name} {i}"] = variable
    return found
