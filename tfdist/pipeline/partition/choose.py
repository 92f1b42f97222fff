"""Divides a model into stages, by time, by parameters or as the user says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import numpy as np

from tfdist.errors import PartitionError
from tfdist.pipeline.partition.balance import balance
from tfdist.pipeline.partition.cost_model import CallCost, estimate
from tfdist.pipeline.partition.cut import Partition, cut
from tfdist.pipeline.partition.graph import Graph
from tfdist.pipeline.partition.linearize import linearize
from tfdist.pipeline.partition.named_cuts import boundaries_after
from tfdist.pipeline.partition.profiler import measure
from tfdist.pipeline.partition.stage_costs import stage_costs

COSTS: dict[str, Callable[[Graph, int], list[CallCost]]] = {
    "time": measure,
    "parameters": estimate,
}
SECONDS_PER_BYTE = 1e-9
"""What a byte takes from stage to stage, where nothing else is said."""


def partition(
    model: keras.Model,
    stages: int,
    *,
    by: str = "time",
    cuts: Sequence[str] | None = None,
    rows: int = 8,
    memory_limit: float = np.inf,
) -> Partition:
    """Divides a model into stages, in one process.

    Several processes must come to the same stages. There one calls `measure` and sends what each
    call takes to the others, and all call `decide` and `cut`.

    Args:
        model: a Functional model, or a Sequential one that is built.
        stages: how many.
        by: what makes stages even: `"time"`, measured on this machine, or `"parameters"`, an
            estimate that runs nothing.
        cuts: instead of that, the names of the calls with which stages end, one less than stages;
            see `boundaries_after`.
        rows: of a microbatch.
        memory_limit: the most bytes of variables that a stage may hold.

    Returns:
        The stages.

    Raises:
        PartitionError: the model has no graph of layers, there are not so many calls, `cuts` names
            others or another number, or no partition keeps the limit.
        ValueError: `by` is something else.

    Example:

        >>> [stage.calls[-1].name for stage in partition(model, 2, cuts=["block_4"]).stages]
        ['block_4', 'head']
    """
    if by not in COSTS:
        names = ", ".join(map(repr, COSTS))
        raise ValueError(f"`by` is one of {names}. Received: {by!r}.")
    graph = linearize(model)
    if cuts is not None:
        if len(cuts) != stages - 1:
            raise PartitionError(
                f"`cuts` names one call less than there are stages, {stages}. Received: "
                f"{len(cuts)} names. Add or leave out some, or ask for {len(cuts) + 1} stages."
            )
        return cut(graph, boundaries_after(graph, cuts))
    check_stages(graph, stages)
    seconds = [cost.seconds for cost in COSTS[by](graph, rows)]
    boundaries = decide(graph, stages, seconds, rows=rows, memory_limit=memory_limit)
    return cut(graph, boundaries, seconds)


def decide(
    graph: Graph,
    stages: int,
    seconds: Sequence[float],
    *,
    rows: int,
    memory_limit: float = np.inf,
    seconds_per_byte: float = SECONDS_PER_BYTE,
) -> list[int]:
    """Decides where to cut; the same in all processes that pass the same numbers.

    Args:
        graph: the model.
        stages: how many.
        seconds: what each call takes.
        rows: of a microbatch.
        memory_limit: the most bytes of variables that a stage may hold.
        seconds_per_byte: what a byte takes from stage to stage.

    Returns:
        The number of the call with which each stage but the first begins, for `cut`.

    Raises:
        PartitionError: there are not so many calls, or no partition keeps the limit.
    """
    check_stages(graph, stages)
    return balance(stage_costs(graph, seconds, rows, seconds_per_byte, memory_limit), stages)


def check_stages(graph: Graph, stages: int) -> None:
    """Raises PartitionError where a model cannot have so many stages."""
    if not 1 <= stages <= len(graph.calls):
        raise PartitionError(
            f"'{graph.model.name}' can be divided into 1 to {len(graph.calls)} stages, one for "
            f"each call of a layer or operation. Received: {stages} stages. Use fewer processes "
            "or virtual stages, or make layers with a call() of their own several layers."
        )
