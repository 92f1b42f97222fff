"""Divides a model into stages by time, by parameters or at given calls."""

import difflib
from collections.abc import Callable, Iterable, Sequence

import keras
import numpy as np
import numpy.typing as npt

from tfdist._src.pipeline.partition import profiler
from tfdist._src.pipeline.partition.cut import Partition, cut_model
from tfdist._src.pipeline.partition.graph import Graph, Key
from tfdist._src.pipeline.partition.linearize import linearize
from tfdist.errors import PartitionError

Costs = npt.NDArray[np.float64]


def balance(costs: Costs, stages: int) -> list[int]:
    """Divides calls into stages so that the most expensive stage is as cheap as possible.

    A pipeline is only as fast as its slowest stage. Ties are broken by the smallest sum of squares,
    which evens out the other stages, then by the earliest last boundary, and so on. The same costs
    yield the same partition everywhere.

    Both steps are dynamic programs (Bellman) over the position of a boundary. To add a stage, only
    the optimum for the calls before it, with one stage fewer, is needed.

    Args:
        costs: a matrix; `costs[i, j]` is the cost, at least 0, of a stage of calls i to j - 1. It
            is infinite if that stage is not allowed, as for i >= j.
        stages: the number of stages.

    Returns:
        The index of the first call of each stage but the first.

    Raises:
        PartitionError: there is no such partition.

    Example:

        >>> prefix = np.array([0, 4, 5, 6, 10])  # Calls that cost 4, 1, 1 and 4.
        >>> costs = prefix[None] - prefix[:, None]
        >>> balance(np.where(np.triu(costs, 1), costs, np.inf), stages=2)
        [2]
    """
    least = costs[0]
    for _ in range(stages - 1):
        least = np.maximum(least[:, None], costs).min(axis=0)
    worst = least[-1]
    if not np.isfinite(worst):
        raise PartitionError(
            f"There is no partition into {stages} stages within the limits of a stage. "
            f"Received: {len(costs) - 1} calls. Choose another number of stages, or raise the "
            "memory limit."
        )
    squares = np.where(costs <= worst, costs, np.inf) ** 2
    sums, begins = squares[0], []
    for _ in range(stages - 1):
        candidates = sums[:, None] + squares
        begins.append(candidates.argmin(axis=0))
        sums = candidates.min(axis=0)
    boundaries = [len(costs) - 1]
    for begin in reversed(begins):
        boundaries.append(int(begin[boundaries[-1]]))
    return boundaries[:0:-1]


_PARTS = 1 << 20


def stage_costs(
    graph: Graph,
    seconds: Sequence[float],
    rows: int,
    seconds_per_byte: float,
    memory_limit: float = np.inf,
) -> Costs:
    """Returns the costs of all possible stages as a matrix, as for `balance`.

    Args:
        graph: the model.
        seconds: the time of each call, forward and backward.
        rows: the rows of a microbatch.
        seconds_per_byte: the transfer time of a byte to or from another stage.
        memory_limit: the maximum bytes of variables in a stage.

    Returns:
        At `[i, j]`, the cost of the stage of calls i to j - 1. The entries are integers in units of
        about a millionth of the model's cost, so that equal stages compare equal regardless of the
        order of summation.
    """
    calls = len(graph.calls)
    received, sent = _traffic(graph, rows)
    total = np.concatenate([[0.0], np.cumsum(seconds)])
    costs = total[None, :] - total[:, None] + (received + sent) * seconds_per_byte
    costs = np.rint(costs * (_PARTS / (total[-1] or 1.0)))
    allowed = np.triu(np.ones((calls + 1, calls + 1), bool), 1)
    if np.isfinite(memory_limit):
        allowed &= _memory(graph) <= memory_limit
    return np.where(allowed, costs, np.inf)


def _traffic(graph: Graph, rows: int) -> tuple[Costs, Costs]:
    """Returns the bytes that each possible stage receives from earlier and sends to later stages.

    Floating-point values count twice, since their gradients flow back. The model's inputs do not
    count, since a stage reads them from the batch.
    """
    producer = {key: n for n, call in enumerate(graph.calls) for key in call.outputs}
    uses: dict[Key, list[int]] = {}
    for n, call in enumerate(graph.calls):
        for key in call.inputs:
            uses.setdefault(key, []).append(n)
    for key in graph.outputs:  # The last stage computes the loss.
        uses.setdefault(key, []).append(len(graph.calls) - 1)
    received, sent = _zeros(graph), _zeros(graph)
    for key, users in uses.items():
        if key not in producer:
            continue
        size = profiler.bytes_of(graph.specs[key], rows)
        if graph.specs[key].is_floating:
            size *= 2
        mask = graph.calls[producer[key]].masks.get(key)
        if mask is not None:
            size += profiler.bytes_of(mask, rows)
        _add_for_spans(received, producer[key] + 1, users, size)
        # The stages that contain the producer but not the last user.
        sent[: producer[key] + 1, producer[key] + 1 : max(users) + 1] += size
    return received, sent


def _memory(graph: Graph) -> Costs:
    """Returns the bytes of the variables of each possible stage, each variable counted once."""
    users: dict[int, list[int]] = {}
    sizes: dict[int, int] = {}
    for n, call in enumerate(graph.calls):
        for variable in call.variables:
            users.setdefault(id(variable), []).append(n)
            sizes[id(variable)] = profiler.variable_bytes(variable)
    memory = _zeros(graph)
    for variable_id, calls in users.items():
        _add_for_spans(memory, 0, calls, sizes[variable_id])
    return memory


def _add_for_spans(matrix: Costs, begin: int, users: Iterable[int], amount: float) -> None:
    """Adds an amount to each stage that starts at call `begin` or later and contains a user.

    The users are the indices of the calls that use a value or variable. A stage with several users
    gets the amount once.
    """
    for user in sorted(set(users)):
        # The stages whose first user is this call.
        matrix[begin : user + 1, user + 1 :] += amount
        begin = max(begin, user + 1)


def _zeros(graph: Graph) -> Costs:
    return np.zeros((len(graph.calls) + 1, len(graph.calls) + 1))


def boundaries_after(graph: Graph, cuts: Sequence[str]) -> list[int]:
    """Returns the boundaries after the named calls.

    Args:
        graph: the model.
        cuts: names of calls: of a layer or operation, such as `"block_4"`; in a nested model,
            `"encoder/dense"`; for a layer's second call, `"dense#2"`. The name of a nested model,
            `"encoder"`, means its last call. Each named call ends a stage; the calls after the last
            named call form the last stage.

    Returns:
        The boundaries for `cut_model`, in the order of the calls.

    Raises:
        PartitionError: a call does not exist or is the last one, or two names mean the same call.
    """
    after: dict[str, int] = {}
    for number, call in enumerate(graph.calls):
        after[call.name] = number + 1
        parts = call.name.split("/")
        for depth in range(1, len(parts)):
            after["/".join(parts[:depth])] = number + 1
    for name in cuts:
        if name not in after:
            near = difflib.get_close_matches(name, after, n=3, cutoff=0.4) or list(after)[:3]
            raise PartitionError(
                f"`cuts` must name calls of the model, after which to cut. Received: {name!r}, "
                f"which is not one. Similar names are {', '.join(map(repr, near))}."
            )
        if after[name] == len(graph.calls):
            raise PartitionError(
                f"`cuts` must name the last call of every stage but the last. Received: {name!r}, "
                "the last call of the model. Remove it."
            )
    boundaries = sorted({after[name] for name in cuts})
    if len(boundaries) < len(cuts):
        raise PartitionError(
            f"`cuts` must name each cut once. Received: {list(cuts)}, two of which mean the same "
            "cut. Remove one."
        )
    return boundaries


COSTS: dict[str, Callable[[Graph, int], list[profiler.CallCost]]] = {
    "time": profiler.measure,
    "parameters": profiler.estimate,
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
    others, and all call `decide` and `cut_model`.

    Args:
        model: a Functional model, or a built Sequential one.
        stages: the number of stages.
        balance: the cost to balance among the stages: `"time"`, measured on this host, or
            `"parameters"`, an estimate that runs nothing.
        cuts: the names of the calls to cut after, one fewer than stages, instead of `balance`; see
            `boundaries_after`.
        rows: the rows of a microbatch.
        memory_limit: the maximum bytes of variables in a stage.

    Returns:
        The stages.

    Raises:
        PartitionError: the model has no graph of layers or too few calls, `cuts` has unknown
            names or the wrong number of them, or no partition is within the limit.
        ValueError: `balance` is neither `"time"` nor `"parameters"`.

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
        return cut_model(graph, boundaries_after(graph, cuts))
    check_stages(graph, stages)
    seconds = [cost.seconds for cost in COSTS[balance](graph, rows)]
    boundaries = decide(graph, stages, seconds, rows=rows, memory_limit=memory_limit)
    return cut_model(graph, boundaries, seconds)


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
        The index of the first call of each stage but the first, for `cut_model`.

    Raises:
        PartitionError: there are too few calls, or no partition is within the limit.
    """
    check_stages(graph, stages)
    return balance(stage_costs(graph, seconds, rows, seconds_per_byte, memory_limit), stages)


def check_stages(graph: Graph, stages: int) -> None:
    """Raises PartitionError if a model cannot have this many stages."""
    if not 1 <= stages <= len(graph.calls):
        raise PartitionError(
            f"'{graph.model.name}' can be divided into 1 to {len(graph.calls)} stages, one for "
            f"each call of a layer or operation. Received: {stages} stages. Use fewer processes "
            "or virtual stages, or split layers with a custom call() into several."
        )
