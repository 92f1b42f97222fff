"""Divides a model into stages by time, by parameters or at given calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import numpy as np

from tfdist._src.pipeline.partition.balance import balance as balance_stages
from tfdist._src.pipeline.partition.cost_model import CallCost, estimate
from tfdist._src.pipeline.partition.cut import Partition, cut
from tfdist._src.pipeline.partition.graph import Graph
from tfdist._src.pipeline.partition.linearize import linearize
from tfdist._src.pipeline.partition.named_cuts import boundaries_after
from tfdist._src.pipeline.partition.profiler import measure
from tfdist._src.pipeline.partition.stage_costs import stage_costs
from tfdist.errors import PartitionError

COSTS: dict[str, Callable[[Graph, int], list[CallCost]]] = {
    "time": measure,
    "parameters": estimate,
}
SECONDS_PER_BYTE = 1e-9
"""The default transfer time of a byte from stage to stage."""


def partition(
    model: keras.Model,
    stages: int,
    *,
    balance: str = "time",
    cuts: Sequence[str] | None = None,
    rows: int = 8,
    memory_limit: float = np.inf,
) -> Partition:
    """Divides a model into stages, in one process.

    Several processes must agree on the stages: one calls `measure` and sends the times to the
    others, and all call `decide` and `cut`.

    Args:
        model: a Functional model, or a built Sequential one.
        stages: the number of stages.
        balance: the cost to balance among the stages: `"time"`, measured on this host, or
            `"parameters"`, an estimate that runs nothing.
        cuts: instead, the names of the calls after which to cut, one fewer than stages; see
            `boundaries_after`.
        rows: the rows of a microbatch.
        memory_limit: the maximum bytes of variables in a stage.

    Returns:
        The stages.

    Raises:
        PartitionError: the model has no graph of layers or too few calls, `cuts` names other calls
            or the wrong number of them, or no partition is within the limit.
        ValueError: `balance` is neither.

    Example:

        >>> [stage.calls[-1].name for stage in partition(model, 2, cuts=["block_4"]).stages]
        ['block_4', 'head']
    """
    if balance not in COSTS:
        names = ", ".join(map(repr, COSTS))
        raise ValueError(f"`balance` must be one of {names}. Received: {balance!r}.")
    graph = linearize(model)
    if cuts is not None:
        if len(cuts) != stages - 1:
            raise PartitionError(
                f"`cuts` must have one name fewer than stages, {stages}. Received: {len(cuts)} "
                f"names. Add or remove names, or use {len(cuts) + 1} stages."
            )
        return cut(graph, boundaries_after(graph, cuts))
    check_stages(graph, stages)
    seconds = [cost.seconds for cost in COSTS[balance](graph, rows)]
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
    """Decides where to cut, identically in all processes that pass the same numbers.

    Args:
        graph: the model.
        stages: the number of stages.
        seconds: the time of each call.
        rows: the rows of a microbatch.
        memory_limit: the maximum bytes of variables in a stage.
        seconds_per_byte: the transfer time of a byte from stage to stage.

    Returns:
        The index of the first call of each stage but the first, for `cut`.

    Raises:
        PartitionError: there are too few calls, or no partition is within the limit.
    """
    check_stages(graph, stages)
    return balance_stages(stage_costs(graph, seconds, rows, seconds_per_byte, memory_limit), stages)


def check_stages(graph: Graph, stages: int) -> None:
    """Raises PartitionError if a model cannot have this many stages."""
    if not 1 <= stages <= len(graph.calls):
        raise PartitionError(
            f"'{graph.model.name}' can be divided into 1 to {len(graph.calls)} stages, one for "
            f"each call of a layer or operation. Received: {stages} stages. Use fewer processes "
            "or virtual stages, or split layers with a custom call() into several."
        )
