"""Chooses where to cut a model, identically on all workers, by the chief's measurements."""

from __future__ import annotations

import json
from collections.abc import Sequence

import keras

from tfdist._src.pipeline.partition.choose import COSTS, check_stages, decide, partition
from tfdist._src.pipeline.partition.cut import Partition, cut
from tfdist._src.pipeline.partition.linearize import linearize
from tfdist._src.pipeline.placement.strategy import HybridStrategy
from tfdist.errors import TfdistError, UnsupportedError

# Rows of the measured microbatches: enough to load the processor, few enough to be quick.
_ROWS = 8


def choose(
    model: keras.Model, strategy: HybridStrategy, cuts: Sequence[str] | None, balance: str
) -> Partition:
    """Cuts a model into the stages of a strategy; all workers must call it together.

    Args:
        model: the full model.
        strategy: its schedule determines the number of stages.
        cuts: the names of the calls after which to cut; None to choose.
        balance: `"time"` or `"parameters"`.

    Raises:
        PartitionError: the model cannot be cut this way.
        UnsupportedError: the chief could not time it.
    """
    _check_rows(model, strategy)
    stages = strategy.stages
    if cuts is not None or stages == 1 or balance not in COSTS:
        return partition(model, stages, balance=balance, cuts=cuts)
    graph = linearize(model)
    check_stages(graph, stages)
    group = strategy.extended.group
    local: dict[str, object] = {}
    if group.topology.is_chief:
        try:
            local["seconds"] = [cost.seconds for cost in COSTS[balance](graph, _ROWS)]
        except (TfdistError, ValueError) as error:
            local["error"] = str(error)
    result = json.loads(group.exchange("stages", json.dumps(local))[0])
    if "error" in result:
        raise UnsupportedError(f"The chief could not time the model: {result['error']}")
    seconds = result["seconds"]
    return cut(graph, decide(graph, stages, seconds, rows=_ROWS), seconds)


def _check_rows(model: keras.Model, strategy: HybridStrategy) -> None:
    """Checks that a model accepts any number of rows, unless it gets full batches.

    Raises:
        UnsupportedError: it has a fixed batch size.
    """
    if strategy.microbatches * strategy.num_replicas_in_sync == 1 or not model.built:
        return
    for tensor in model.inputs or []:
        if tensor.shape[:1] not in ((), (None,)):
            raise UnsupportedError(
                "A PipelineModel gets a batch in parts, so its inputs must not fix the batch size. "
                f"Received: {tensor.name!r} of shape {tuple(tensor.shape)}. Pass `shape` without "
                "the rows instead of `batch_shape` or `batch_size`; layers with `stateful=True` "
                "need a full batch."
            )
