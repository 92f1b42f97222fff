"""Divides a model into stages: by run time, by parameter counts, or after given calls."""

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

    A pipeline is only as fast as its slowest stage. If several partitions are equally good, the
    function returns the one with the smallest sum of squared stage costs, so that the costs of the
    other stages are also similar. If there are still several, the function returns the one with the
    earliest last boundary, then the earliest second-to-last boundary, and so on. So the same costs
    give the same partition on all workers.

    Both the smallest maximum and the smallest sum of squares are found by dynamic programming. The
    best partition of the first j calls into s + 1 stages follows from the costs of the last stage
    and from the best partitions of fewer calls into s stages.

    Args:
        costs: a matrix. `costs[i, j]` is the nonnegative cost of a stage that consists of the calls
            i to j - 1. The entry is infinite if that stage is not allowed or has no calls (i >= j).
        stages: the number of stages.

    Returns:
        The index of the first call of each stage except the first stage.

    Raises:
        PartitionError: every partition into this number of stages contains a stage with an
            infinite cost.

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
    """Returns the matrix of the costs of all possible stages, for `balance`.

    Args:
        graph: the model.
        seconds: for each call, the total time of its forward and backward pass.
        rows: the number of rows in a microbatch.
        seconds_per_byte: the time to transfer one byte from one stage to another.
        memory_limit: the maximum size of the variables of a stage, in bytes.

    Returns:
        A matrix. The entry `[i, j]` is the cost of a stage that consists of the calls i to j - 1.
        All entries are rounded to integers, in units of about a millionth of the time of all calls.
        Otherwise, rounding errors could make the costs of identical stages differ.
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
    """Returns how many bytes each possible stage receives from earlier and sends to later stages.

    Floating-point values count twice, since their gradients are sent back. The model's inputs do
    not count, since each stage reads them from the batch.
    """
    producer = {key: n for n, call in enumerate(graph.calls) for key in call.outputs}
    uses: dict[Key, list[int]] = {}
    for n, call in enumerate(graph.calls):
        for key in call.inputs:
            uses.setdefault(key, []).append(n)
    for key in graph.outputs:  # The last stage needs all outputs, since it computes the loss.
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
        # A stage sends the value if the stage contains the call that produces the value, but not
        # the last call that uses the value.
        sent[: producer[key] + 1, producer[key] + 1 : max(users) + 1] += size
    return received, sent


def _memory(graph: Graph) -> Costs:
    """Returns the size in bytes of the variables of each possible stage.

    A variable that several calls of a stage use is counted once.
    """
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
    """Adds an amount to the cost of each stage that uses a certain value or variable.

    The amount is added once, even if several calls of the stage use the value.

    Args:
        matrix: the matrix with an entry for each possible stage, which is modified.
        begin: the first call of the earliest stage to which the amount is added.
        users: the indices of the calls that use the value or variable.
        amount: the amount to add.
    """
    for user in sorted(set(users)):
        # These are the stages in which this call is the first user.
        matrix[begin : user + 1, user + 1 :] += amount
        begin = max(begin, user + 1)


def _zeros(graph: Graph) -> Costs:
    return np.zeros((len(graph.calls) + 1, len(graph.calls) + 1))


def boundaries_after(graph: Graph, cuts: Sequence[str]) -> list[int]:
    """Returns the stage boundaries that follow the named calls.

    Args:
        graph: the model.
        cuts: the names of the calls that end a stage. The calls after the last named call form the
            last stage. A call is named after its layer or operation, such as `"block_4"`. A call
            in a nested model is prefixed with the model's name, as in `"encoder/dense"`, and the
            second call of the same layer is `"dense#2"`. The name of a nested model, `"encoder"`,
            stands for the last call in that model.

    Returns:
        The `boundaries` argument of `cut_model`, in ascending order.

    Raises:
        PartitionError: the model has no call of a given name, a name stands for the model's last
            call, or two names stand for the same call.
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

    Several processes must not call this function separately with `balance="time"`, since they
    would measure different times and choose different stages. Instead, one process calls `measure`
    and sends the times to the others, and all processes call `decide` and `cut_model` with these
    times.

    Args:
        model: a Functional model, or a Sequential model that is built.
        stages: the number of stages.
        balance: the cost to balance among the stages if `cuts` is None: `"time"`, measured on this
            host, or `"parameters"`, an estimate from the parameter counts that does not run the
            model.
        cuts: the names of the calls after which to cut the model, one for each stage except the
            last; see `boundaries_after`. If None, the stages are chosen by `balance`.
        rows: the number of rows in a microbatch.
        memory_limit: the maximum size of the variables of a stage, in bytes. It has no effect if
            `cuts` is given.

    Returns:
        The stages.

    Raises:
        PartitionError: the model has no graph of layers, the model has fewer calls than `stages`,
            `cuts` contains an unknown name or the wrong number of names, or no partition is within
            `memory_limit`.
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
    """Chooses the calls before which a model is cut.

    All processes that pass the same arguments get the same result.

    Args:
        graph: the model.
        stages: the number of stages.
        seconds: for each call, the total time of its forward and backward pass.
        rows: the number of rows in a microbatch.
        memory_limit: the maximum size of the variables of a stage, in bytes.
        seconds_per_byte: the time to transfer one byte from one stage to another.

    Returns:
        The `boundaries` argument of `cut_model`: the index of the first call of each stage except
        the first stage.

    Raises:
        PartitionError: the model has fewer calls than `stages`, or no partition is within
            `memory_limit`.
    """
    check_stages(graph, stages)
    return balance(stage_costs(graph, seconds, rows, seconds_per_byte, memory_limit), stages)


def check_stages(graph: Graph, stages: int) -> None:
    """Raises PartitionError if a model cannot be divided into this number of stages."""
    if not 1 <= stages <= len(graph.calls):
        raise PartitionError(
            f"'{graph.model.name}' can be divided into 1 to {len(graph.calls)} stages, one for "
            f"each call of a layer or operation. Received: {stages} stages. Use fewer processes "
            "or virtual stages, or split layers with a custom call() into several."
        )
