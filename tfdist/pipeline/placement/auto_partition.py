"""Where a strategy cuts a model: the same on all workers, by what the chief has measured."""

from __future__ import annotations

import json
from collections.abc import Sequence

import keras

from tfdist.errors import TfdistError, UnsupportedError
from tfdist.pipeline.partition.choose import COSTS, check_stages, decide, partition
from tfdist.pipeline.partition.cut import Partition, cut
from tfdist.pipeline.partition.linearize import linearize
from tfdist.pipeline.placement.strategy import HybridStrategy

# Of the microbatches that are measured: enough for the processor, and soon done.
_ROWS = 8


def choose(
    model: keras.Model, strategy: HybridStrategy, cuts: Sequence[str] | None, by: str
) -> Partition:
    """Cuts a model into the stages of a strategy; all workers call it together.

    Args:
        model: the whole model.
        strategy: whose schedule says how many stages there are.
        cuts: the names of the calls with which stages end; None to choose.
        by: `"time"` or `"parameters"`.

    Raises:
        PartitionError: the model cannot be cut so.
        UnsupportedError: the chief could not measure it.
    """
    _check_rows(model, strategy)
    stages = strategy.stages
    if cuts is not None or stages == 1 or by not in COSTS:
        return partition(model, stages, by=by, cuts=cuts)
    graph = linearize(model)
    check_stages(graph, stages)
    group = strategy.extended.group
    answer: dict[str, object] = {}
    if group.topology.is_chief:
        try:
            answer["seconds"] = [cost.seconds for cost in COSTS[by](graph, _ROWS)]
        except (TfdistError, ValueError) as error:
            answer["error"] = str(error)
    chiefs = json.loads(group.exchange("stages", json.dumps(answer))[0])
    if "error" in chiefs:
        raise UnsupportedError(f"The model could not be measured: {chiefs['error']}")
    seconds = chiefs["seconds"]
    return cut(graph, decide(graph, stages, seconds, rows=_ROWS), seconds)


def _check_rows(model: keras.Model, strategy: HybridStrategy) -> None:
    """Checks that a model takes any number of rows where it does not see whole batches.

    Raises:
        UnsupportedError: it has a batch size of its own.
    """
    if strategy.microbatches * strategy.num_replicas_in_sync == 1 or not model.built:
        return
    for tensor in model.inputs or []:
        if tensor.shape[:1] not in ((), (None,)):
            raise UnsupportedError(
                "A model in stages sees a batch in parts, so its inputs have no batch size. "
                f"Received: {tensor.name!r} of shape {tuple(tensor.shape)}. Give `shape` without "
                "the rows in place of `batch_shape` or `batch_size`; layers with `stateful=True` "
                "need a whole batch."
            )
