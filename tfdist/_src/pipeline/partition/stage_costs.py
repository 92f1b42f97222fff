"""The cost of any consecutive calls as a stage: computation, transfers and memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tfdist._src.pipeline.partition.balance import Costs
from tfdist._src.pipeline.partition.graph import Graph, Key
from tfdist._src.pipeline.partition.sizes import bytes_of, variable_bytes

_PARTS = 1 << 20


def stage_costs(
    graph: Graph,
    seconds: Sequence[float],
    rows: int,
    seconds_per_byte: float,
    memory_limit: float = np.inf,
) -> Costs:
    """The cost of a stage, for each pair of its first call and the one after its last.

    Args:
        graph: the model.
        seconds: the time of each call, forward and backward.
        rows: the rows of a microbatch.
        seconds_per_byte: the transfer time of a byte to or from another stage.
        memory_limit: the maximum bytes of variables in a stage.

    Returns:
        The matrix for `balance`. Its entries are integers in units of about a millionth of the
        model's cost, so that equal stages compare equal in whatever order their calls add up.
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
    """The bytes that a stage receives from earlier ones, and that it sends to later ones.

    Gradients flow back the same way. The model's inputs do not count: a stage reads them from the
    batch.
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
        size = bytes_of(graph.specs[key], rows)
        if graph.specs[key].is_floating:
            size *= 2
        mask = graph.calls[producer[key]].masks.get(key)
        if mask is not None:
            size += bytes_of(mask, rows)
        _add_for_spans(received, producer[key] + 1, users, size)
        # The stages with the producer but without the last user.
        sent[: producer[key] + 1, producer[key] + 1 : max(users) + 1] += size
    return received, sent


def _memory(graph: Graph) -> Costs:
    """The bytes of a stage's variables, each counted once."""
    users: dict[int, list[int]] = {}
    sizes: dict[int, int] = {}
    for n, call in enumerate(graph.calls):
        for variable in call.variables:
            users.setdefault(id(variable), []).append(n)
            sizes[id(variable)] = variable_bytes(variable)
    memory = _zeros(graph)
    for variable_id, calls in users.items():
        _add_for_spans(memory, 0, calls, sizes[variable_id])
    return memory


def _add_for_spans(matrix: Costs, begin: int, users: Iterable[int], amount: float) -> None:
    """Adds an amount to all spans from `begin` or later that contain at least one user."""
    for user in sorted(set(users)):
        # The spans whose first user this is.
        matrix[begin : user + 1, user + 1 :] += amount
        begin = max(begin, user + 1)


def _zeros(graph: Graph) -> Costs:
    return np.zeros((len(graph.calls) + 1, len(graph.calls) + 1))
