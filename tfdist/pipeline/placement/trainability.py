"""Which variables are trained: what the ranks that hold a layer say of it holds for all."""

from __future__ import annotations

import json
from typing import Any

from tfdist.pipeline.partition.cut import Partition
from tfdist.pipeline.partition.stage import Stage, unique
from tfdist.pipeline.placement.strategy import HybridStrategy


def agree_on_trainable(partition: Partition, strategy: HybridStrategy) -> None:
    """Makes layers and variables trainable or not, as they are where they are held.

    A rank's `model.layers` are those of its own stages, so a script that freezes or unfreezes
    some does so on their ranks alone. All ranks of the job call it together.

    Args:
        partition: of the model.
        strategy: where its stages are.

    Raises:
        ValueError: ranks that hold the same layer or variable say different things.
    """
    group = strategy.extended.group
    mine = [partition.stages[index] for index in strategy.stages_of(strategy.place)]
    things, own = _things(partition.stages), {id(thing) for thing in _things(mine)}
    said = [int(thing.trainable) if id(thing) in own else None for thing in things]
    answers = [json.loads(text) for text in group.exchange("trainable", json.dumps(said))]
    # Layers first, which say it to their variables.
    for thing, flags in zip(things, zip(*answers, strict=True), strict=True):
        known = {rank: flag for rank, flag in enumerate(flags) if flag is not None}
        if len(set(known.values())) > 1:
            workers = group.topology.workers
            yes, no = (min(r for r, flag in known.items() if flag == f) for f in (1, 0))
            raise ValueError(
                "What is trained is trained on all workers that hold it. Received: "
                f"{getattr(thing, 'path', thing.name)!r}, trainable on {workers[yes]} and not on "
                f"{workers[no]}. Set `trainable` on all workers alike."
            )
        wanted = bool(next(iter(known.values())))
        if thing.trainable != wanted:
            thing.trainable = wanted


def _things(stages: Any) -> list[Any]:
    of_stages: list[Stage] = list(stages)
    layers = unique(layer for stage in of_stages for layer in stage.layers)
    return [*layers, *unique(v for stage in of_stages for v in stage.variables)]
