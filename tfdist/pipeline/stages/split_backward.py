"""Cuts the graph of a stage's forward and backward pass into parts that run at different times.

The forward part runs first. The backward part is one, or two: the chain of input gradients, which
earlier stages wait for, and the variables' gradients, which nobody waits for (Qi et al., "Zero
bubble pipeline parallelism", 2023). What a later part needs of an earlier one is handed over; what
costs nothing to make again (constants, reads of variables, casts of them) is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.pipeline.stages.trace import Trace


@dataclass(frozen=True)
class Part:
    """Operations of a graph that run together.

    Attributes:
        operations: all of them.
        feeds: the tensors that they need from elsewhere.
        fetches: the tensors that are needed elsewhere.
        sums: the tensors that are added to those of other microbatches.
    """

    operations: frozenset[tf.Operation]
    feeds: tuple[tf.Tensor, ...]
    fetches: tuple[tf.Tensor, ...]
    sums: tuple[tf.Tensor, ...] = ()


@dataclass(frozen=True)
class Parts:
    """A stage's parts. Without a split `input_gradient` is the whole backward pass."""

    forward: Part
    input_gradient: Part | None = None
    weight_gradient: Part | None = None


def cut(trace: Trace, *, split: bool = False, remat: bool = False) -> Parts:
    """Cuts a trace into parts.

    Args:
        trace: of a stage.
        split: whether the variables' gradients are a part of their own.
        remat: whether the backward pass runs the forward pass again, rather than keep what it
            has computed.
    """
    results = [*trace.outputs, *trace.others]
    graph = _Graph(trace)
    forward = graph.ancestors([t.op for t in results] + trace.effects)
    if not trace.seeds:
        return Parts(graph.part(forward, results))
    of_inputs = [g for g in trace.input_gradients if g is not None]
    of_variables = flatten(trace.variable_gradients)
    dense = [g for g in trace.variable_gradients if isinstance(g, tf.Tensor)]
    sparse = flatten(g for g in trace.variable_gradients if isinstance(g, tf.IndexedSlices))
    again = graph.without_effect if remat else graph.free
    if not split:
        backward, needed = graph.section([*of_inputs, *of_variables], forward, again)
        kept = [t for t in needed if t.name not in graph.seeds]
        return Parts(
            graph.part(forward, [*results, *kept]),
            graph.part(backward, [*of_inputs, *sparse], dense),
        )
    wanted = graph.ancestors([g.op for g in [*of_inputs, *of_variables]])
    chain = [*of_inputs, *(g for g in trace.step_gradients if g.op in wanted)]
    first, first_needs = graph.section(chain, forward, again)
    second, second_needs = graph.section(of_variables, forward | first, graph.free)
    kept = [t for t in [*first_needs, *second_needs] if t.op in forward and t.op not in first]
    between = [t for t in second_needs if t.op in first]
    return Parts(
        graph.part(forward, [*results, *kept]),
        graph.part(first, [*of_inputs, *between]),
        graph.part(second, sparse, dense),
    )


def cut_before(trace: Trace, outside: Callable[[tf.Operation], bool]) -> Part:
    """The part that computes the results of a forward pass, and leaves its effects out.

    Args:
        trace: of a forward pass alone.
        outside: which operations do not belong to it; what they make is fed.
    """
    graph = _Graph(trace)
    return graph.part(graph.ancestors([t.op for t in trace.others], outside), trace.others)


def flatten(gradients: Iterable[Any]) -> list[tf.Tensor]:
    """The tensors that gradients are made of, of which some are None or `tf.IndexedSlices`."""
    tensors = []
    for gradient in gradients:
        if isinstance(gradient, tf.IndexedSlices):
            tensors += [gradient.values, gradient.indices, gradient.dense_shape]
        elif gradient is not None:
            tensors.append(gradient)
    return tensors


# Not worth keeping where what they are made of is at hand.
_CHEAP = frozenset({"Cast", "Identity", "Reshape", "ExpandDims", "Squeeze", "Shape"})


class _Graph:
    """The graph of a trace, and which of its operations can run again."""

    def __init__(self, trace: Trace) -> None:
        self._captured = trace.captured
        self.inputs = {t.name for t in trace.inputs}
        self.seeds = {t.name for t in trace.seeds}
        self._effects = set(trace.effects)
        self._written = {
            t.name for op in trace.effects for t in op.inputs if t.dtype == tf.resource
        }
        self._free: dict[tf.Operation, bool] = {}

    def ancestors(
        self,
        roots: Iterable[tf.Operation],
        outside: Callable[[tf.Operation], bool] = lambda op: False,
    ) -> frozenset[tf.Operation]:
        """The operations that these depend on by their inputs, and these; none beyond others."""
        found: set[tf.Operation] = set()
        pending = list(roots)
        while pending:
            op = pending.pop()
            if op not in found and not outside(op):
                found.add(op)
                pending += [t.op for t in op.inputs]
        return frozenset(found)

    def section(
        self,
        targets: Sequence[tf.Tensor],
        before: frozenset[tf.Operation],
        again: Callable[[tf.Operation], bool],
    ) -> tuple[frozenset[tf.Operation], list[tf.Tensor]]:
        """What to run for the targets after other operations have run, and what it needs of them.

        Args:
            targets: the tensors to compute.
            before: the operations that have run.
            again: which of them may run again.
        """
        found: set[tf.Operation] = set()
        needed: dict[str, tf.Tensor] = {}
        pending = list(targets)
        while pending:
            tensor = pending.pop()
            if tensor.name in self._captured:
                continue
            outside = tensor.name in self.inputs or tensor.name in self.seeds
            if outside or (tensor.op in before and not again(tensor.op)):
                needed[tensor.name] = tensor
            elif tensor.op not in found:
                found.add(tensor.op)
                pending += tensor.op.inputs
        return frozenset(found), list(needed.values())

    def part(
        self,
        operations: frozenset[tf.Operation],
        fetches: Sequence[tf.Tensor],
        sums: Sequence[tf.Tensor] = (),
    ) -> Part:
        """The part that runs operations; what they do not compute is fed."""
        own = {op for op in operations if op.type != "Placeholder"}
        feeds: dict[str, tf.Tensor] = {}
        for tensor in [*(t for op in own for t in op.inputs), *fetches, *sums]:
            if tensor.op not in own and tensor.name not in self._captured:
                feeds[tensor.name] = tensor
        unique, added = ({t.name: t for t in some} for some in (fetches, sums))
        ordered = sorted(feeds.values(), key=lambda t: t.name)
        return Part(frozenset(own), tuple(ordered), tuple(unique.values()), tuple(added.values()))

    def free(self, op: tf.Operation) -> bool:
        """Whether running it again costs next to nothing and gives the same."""
        if op not in self._free:
            self._free[op] = False  # Of a cycle, as loops have.
            self._free[op] = self._is_free(op)
        return self._free[op]

    def without_effect(self, op: tf.Operation) -> bool:
        """Whether running it again gives the same."""
        if op in self._effects or op.type == "Placeholder":
            return False
        return not any(t.name in self._written for t in op.inputs)

    def _is_free(self, op: tf.Operation) -> bool:
        if op.type == "Const":
            return True
        if op.type == "ReadVariableOp":
            return op.inputs[0].name in self._captured and op.inputs[0].name not in self._written
        return op.type in _CHEAP and all(self.free(t.op) for t in op.inputs)
