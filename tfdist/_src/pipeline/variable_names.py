"""Names a worker's variables identically on all workers with a copy."""

from typing import Any

from tfdist._src.keras.optimizers import applying
from tfdist._src.pipeline.model import PipelineModel


def copies_of(model: Any) -> dict[str, Any]:
    """Returns this worker's weights and optimizer variables that other workers hold copies of.

    Args:
        model: a Keras model; may be a PipelineModel.

    Returns:
        Keras variables by name. Workers with the same name hold copies of the same variable.
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
