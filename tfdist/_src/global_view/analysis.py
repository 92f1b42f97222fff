"""Chooses the layouts of the operands and results of each operation in a graph."""

from __future__ import annotations

import copy
import heapq
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist._src.global_view.contents import contents_of
from tfdist._src.global_view.decision import Call, Decision, Value, dims_of, merged
from tfdist._src.global_view.layout import (
    PER_WORKER,
    SHARED,
    WHOLE,
    ZEROED_SUM,
    Dim,
    Layout,
    Symbol,
)
from tfdist._src.global_view.rules import PER_WORKER_TYPES, RULES
from tfdist._src.internals.graphs import called_graph, is_call


class Analysis:
    """The layouts of all tensors of a graph, and the decisions on how to partition its operations.

    Args:
        graph: a `FuncGraph`.
        inputs: facts about the graph's inputs, in order.
        batch: the symbol for the number of rows of the batch.

    Attributes:
        operations: the operations to run, in topological order.
        decisions: how to partition each of these operations.
        values: facts about each tensor, by the tensor's `id()`.
        results: the tensors to compute; by default, the graph's outputs.
        outputs: facts about the results.
    """

    def __init__(self, graph: Any, inputs: Sequence[Value], batch: Symbol) -> None:
        self.graph, self.batch = graph, batch
        self.inputs = list(inputs)
        self.values: dict[int, Value] = {}
        self.decisions: dict[Any, Decision] = {}
        for tensor, value in zip(graph.inputs, inputs, strict=True):
            self.values[id(tensor)] = value
        self.operations = needed_operations(graph)
        for op in self.operations:
            self._decide(op)
        self.results = list(graph.outputs)
        self.outputs = [self.values[id(t)] for t in self.results]

    def up_to(self, tensors: Sequence[Any]) -> Analysis:
        """Restricts the analysis to the operations that some tensors depend on.

        Other operations are left out, even if they have side effects.
        """
        part = copy.copy(self)
        needed = ancestors(tensors)
        part.operations = [op for op in self.operations if op in needed]
        part.results = list(tensors)
        part.outputs = [self.values[id(t)] for t in tensors]
        return part

    def communicated(self, layouts: Sequence[Layout]) -> list[tuple[Any, Any]]:
        """Returns the values that workers have to communicate.

        Args:
            layouts: the required layouts of the results.

        Returns:
            Pairs of a tensor and the operation that needs it. The tensor belongs to this graph or
            to a function that the graph calls.
        """
        found: dict[int, tuple[Any, Any]] = {}
        for op in self.operations:
            decision = self.decisions[op]
            for tensor, layout in zip(op.inputs, decision.inputs, strict=True):
                if layout is not None and needs_others(self.values[id(tensor)].layout, layout):
                    found.setdefault(id(tensor), (tensor, op))
            for part in decision.parts:
                inside = part.communicated([v.layout for v in part.outputs])
                found.update((id(tensor), (tensor, by)) for tensor, by in inside)
        for tensor, value, layout in zip(self.results, self.outputs, layouts, strict=True):
            if needs_others(value.layout, layout):
                found.setdefault(id(tensor), (tensor, tensor.op))
        return list(found.values())

    def _decide(self, op: Any) -> None:
        values = [self.values[id(t)] for t in op.inputs]
        decision = decide(Call(op, values, self))
        self.decisions[op] = decision
        if decision.values is not None:
            for tensor, value in zip(op.outputs, decision.values, strict=True):
                self.values[id(tensor)] = value
            return
        contents = contents_of(op, values)
        for i, tensor in enumerate(op.outputs):
            known = None if decision.dims is None else decision.dims[i]
            layout = decision.outputs[i]
            dims = dims_of(tensor, known) if known is None else merged(tensor, known)
            if layout.kind == "rows" and dims is not None:
                dims = self._with_rows(dims, layout)
            content = None if contents is None else contents[i]
            self.values[id(tensor)] = Value(layout, dims, content)

    def _with_rows(self, dims: tuple[Dim, ...], layout: Layout) -> tuple[Dim, ...]:
        """Returns `dims`, with the size along the axis of the rows computed from the layout."""
        size = layout.outer * Dim(1, (self.batch,)) * layout.inner
        return (*dims[: layout.axis], size, *dims[layout.axis + 1 :])

    def value_of(self, tensor: Any) -> Value:
        """Returns the facts about a tensor of the graph."""
        return self.values[id(tensor)]

    def part(self, op: Any, function: str, inputs: Sequence[Value]) -> Analysis:
        """Analyzes a function that an operation calls."""
        return Analysis(_called(op, function), inputs, self.batch)


_CALLED = "_tfdist_called"


def _called(op: Any, function: str) -> Any:
    """Returns the graph of a function that an operation calls.

    Repeated calls return the same object, so that several analyses of the function refer to the
    same tensors.
    """
    known = getattr(op.graph, _CALLED, None)
    if known is None:
        known = {}
        setattr(op.graph, _CALLED, known)
    if (op.name, function) not in known:
        known[op.name, function] = called_graph(op, function)
    return known[op.name, function]


def needs_others(own: Layout, wanted: Layout) -> bool:
    """Whether converting a value from one layout to another requires communication."""
    if own == wanted or own.kind not in ("rows", "partial"):
        return False
    return not (own.is_sum and wanted.is_sum)


def ancestors(tensors: Sequence[Any]) -> set[Any]:
    """Returns the operations that tensors depend on, including the ones that compute them."""
    found: set[Any] = set()
    wanted = [t.op for t in tensors]
    while wanted:
        op = wanted.pop()
        if op not in found:
            found.add(op)
            wanted += [t.op for t in op.inputs]
    return found


def needed_operations(graph: Any) -> list[Any]:
    """Returns the operations that a graph's outputs and side effects need, sorted topologically."""
    given = {t.op for t in graph.inputs}
    wanted = [t.op for t in graph.outputs] + list(graph.control_outputs)
    found: set[Any] = set()
    while wanted:
        op = wanted.pop()
        if op in found:
            continue
        found.add(op)
        if op not in given:
            wanted += [t.op for t in op.inputs]
            wanted += op.control_inputs
    return _sorted([op for op in graph.get_operations() if op in found and op not in given])


def _sorted(operations: list[Any]) -> list[Any]:
    """Sorts operations topologically, and otherwise keeps their order.

    The order of creation is not always topological: the gradient of a loop adds inputs to the loop
    after the loop has been created.
    """
    numbers = {op: i for i, op in enumerate(operations)}
    missing: list[int] = []
    users: list[list[int]] = [[] for _ in operations]
    for i, op in enumerate(operations):
        before = {t.op for t in op.inputs} | set(op.control_inputs)
        sources = [numbers[o] for o in before if o in numbers]
        missing.append(len(sources))
        for source in sources:
            users[source].append(i)
    ready = [i for i, count in enumerate(missing) if count == 0]
    result = []
    while ready:
        i = heapq.heappop(ready)
        result.append(operations[i])
        for user in users[i]:
            missing[user] -= 1
            if missing[user] == 0:
                heapq.heappush(ready, user)
    return result


def decide(call: Call) -> Decision:
    """Applies the rule for the type of an operation, or gathers the operands if no rule applies."""
    rule = RULES.get(call.type)
    if rule is None and is_call(call.op):
        rule = RULES["PartitionedCall"]
    elif call.has("shared") and not _is_inlined(call):
        return _once(call)
    elif call.has("per_worker") and call.type not in PER_WORKER_TYPES:
        rule = None
    if rule is not None:
        decision = rule(call)
        if decision is not None:
            return decision
    if call.has("per_worker"):
        inputs = [ZEROED_SUM if v.is_sum and not v.zeroed else None for v in call.layouts]
        return Decision(inputs, [PER_WORKER] * len(call.op.outputs))
    if all(layout.kind in ("whole", "unset") for layout in call.layouts):
        return call.all(WHOLE)
    return call.whole("no rule" if rule is None else "rows are coupled")


def _is_inlined(call: Call) -> bool:
    """Whether the partitioned graph contains a function's operations instead of a call of it."""
    calls = call.type in ("PartitionedCall", "StatefulPartitionedCall")
    return calls and not call.op.node_def.attr["_XlaMustCompile"].b


def _once(call: Call) -> Decision:
    """Returns the decision to run an operation once per process, for all workers of the process."""
    decision = call.whole("state that devices share")
    decision.outputs = [SHARED if t.dtype == tf.resource else WHOLE for t in call.op.outputs]
    decision.emit = by_one_worker
    return decision


def by_one_worker(emitter: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Adds the operation on the first worker of a process; the other workers reuse the results."""
    return emitter.once(call.op, inputs)
