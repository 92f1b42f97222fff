"""The variables that a worker holds, by names that are the same on all that hold a copy."""

from __future__ import annotations

from typing import Any

from tfdist.internals.optimizer import accumulators, updating_optimizers
from tfdist.pipeline.model import PipelineModel
from tfdist.sharding.sharded import sharded_by


def copies_of(model: Any) -> dict[str, Any]:
    """A model's weights and its optimizer's variables on this worker, of which others have copies.

    Gradients that are accumulated for an update are each replica's own until then, and so are the
    slots of an optimizer that is shared out.

    Args:
        model: of Keras, in stages or not.

    Returns:
        Variables of Keras by names: two workers hold copies of one variable where they have the
        same name for it.
    """
    optimizer = getattr(model, "optimizer", None)
    of_optimizer = _common(optimizer) if optimizer else []
    place, numbers = 0, {id(v): i for i, v in enumerate(model.weights)}
    if isinstance(model, PipelineModel):
        place = model.distribute_strategy.place
        numbers = {id(v): i for i, v in enumerate(model.partition.graph.model.variables)}
    return {
        **{f"weight {numbers[id(v)]}": v for v in model.weights},
        **{f"place {place}, optimizer {i}": v for i, v in enumerate(of_optimizer)},
    }


def _common(optimizer: Any) -> list[Any]:
    updating = updating_optimizers(optimizer)
    apart = {id(v) for own in updating for v in accumulators(own)}
    apart |= {id(v) for o in updating if sharded_by(o) is not None for v in o.variables if v.shape}
    return [v for v in optimizer.variables if id(v) not in apart]
