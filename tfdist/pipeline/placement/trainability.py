"""Which variables are trained: the ranks that hold a layer decide for all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tfdist.pipeline.partition.cut import Partition
from tfdist.pipeline.partition.stage import Stage, unique
from tfdist.pipeline.placement.strategy import HybridStrategy


def agree_on_trainable(partition: Partition, strategy: HybridStrategy) -> None:
    """Sets `trainable` of all layers and variables as on the ranks that hold them.

    A rank's `model.layers` are those of its stages, so a script that freezes or unfreezes layers
    does so only on their ranks. All ranks of the job must call it together.

    Args:
        partition: the model's partition.
        strategy: the strategy that places its stages.

    Raises:
        ValueError: ranks that hold the same layer or variable disagree.
    """
    group = strategy.extended.group
    local = [partition.stages[index] for index in strategy.stages_of(strategy.pipeline_rank)]
    items = _layers_and_variables(partition.stages)
    local_ids = {id(item) for item in _layers_and_variables(local)}
    local_flags = [int(item.trainable) if id(item) in local_ids else None for item in items]
    all_flags = [json.loads(text) for text in group.exchange("trainable", json.dumps(local_flags))]
    # Layers first, as they set their variables' flags.
    for item, flags in zip(items, zip(*all_flags, strict=True), strict=True):
        known = {rank: flag for rank, flag in enumerate(flags) if flag is not None}
        if len(set(known.values())) > 1:
            workers = group.topology.workers
            yes, no = (min(r for r, flag in known.items() if flag == f) for f in (1, 0))
            raise ValueError(
                "`trainable` must be equal on all workers that hold a layer or variable. Received: "
                f"{getattr(item, 'path', item.name)!r}, trainable on {workers[yes]} and not on "
                f"{workers[no]}. Set `trainable` identically on all workers."
            )
        # A worker that has yet to join others knows its own stages only.
        wanted = bool(next(iter(known.values()), item.trainable))
        if item.trainable != wanted:
            item.trainable = wanted


def _layers_and_variables(stages: Sequence[Stage]) -> list[Any]:
    layers = unique(layer for stage in stages for layer in stage.layers)
    return [*layers, *unique(v for stage in stages for v in stage.variables)]
