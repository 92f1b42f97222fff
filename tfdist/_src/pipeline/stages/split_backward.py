"""Cuts the graph of a stage's passes into functions that run at different times.

The forward part runs first. The backward part is whole or split in two: the chain of input
gradients, which earlier stages wait for, and the variables' gradients, which nothing waits for (Qi
et al., "Zero bubble pipeline parallelism", 2023). Tensors that a later part needs from an earlier
part are passed to it, unless they cost nothing to recompute: constants, variable reads and casts of
these.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist._src.pipeline.stages.trace import Trace
from tfdist._src.xla import compiled_between_collectives


@dataclass(frozen=True)
class Part:
    """Operations of a graph that run together.

    Attributes:
        operations: the operations.
        feeds: the tensors that they need from elsewhere.
        fetches: the tensors that are needed elsewhere.
        sums: the tensors that are summed over the microbatches.
    """

    operations: frozenset[tf.Operation]
    feeds: tuple[tf.Tensor, ...]
    fetches: tuple[tf.Tensor, ...]
    sums: tuple[tf.Tensor, ...] = ()


@dataclass(frozen=True)
class Parts:
    """A stage's parts. Without a split, `input_gradient` is the whole backward pass."""

    forward: Part
    input_gradient: Part | None = None
    weight_gradient: Part | None = None


def split_passes(trace: Trace, *, split: bool = False, remat: bool = False) -> Parts:
    """Cuts a trace into parts.

    Args:
        trace: a stage's trace.
        split: whether the variables' gradients form a separate part.
        remat: whether the backward pass reruns the forward pass instead of keeping its results.
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
    recompute = graph.without_effect if remat else graph.free
    effects = trace.backward_effects
    if not split:
        backward, needed = graph.section([*of_inputs, *of_variables], forward, recompute, effects)
        kept = [t for t in needed if t.name not in graph.seeds]
        return Parts(
            graph.part(forward, [*results, *kept]),
            graph.part(backward, [*of_inputs, *sparse], dense),
        )
    wanted = graph.ancestors([g.op for g in [*of_inputs, *of_variables]])
    chain = [*of_inputs, *(g for g in trace.step_gradients if g.op in wanted)]
    first, first_needs = graph.section(chain, forward, recompute, effects)
    second, second_needs = graph.section(of_variables, forward | first, graph.free)
    kept = [t for t in [*first_needs, *second_needs] if t.op in forward and t.op not in first]
    between = [t for t in second_needs if t.op in first]
    return Parts(
        graph.part(forward, [*results, *kept]),
        graph.part(first, [*of_inputs, *between]),
        graph.part(second, sparse, dense),
    )


def results_part(trace: Trace, outside: Callable[[tf.Operation], bool]) -> Part:
    """Returns the part that computes a forward pass's results, without its side effects.

    Args:
        trace: the trace of a forward pass only.
        outside: returns whether to exclude an operation; its outputs are fed.
    """
    graph = _Graph(trace)
    return graph.part(graph.ancestors([t.op for t in trace.others], outside), trace.others)


def flatten(gradients: Iterable[Any]) -> list[tf.Tensor]:
    """Flattens gradients, which may be tensors, None or `tf.IndexedSlices`, to tensors."""
    tensors = []
    for gradient in gradients:
        if isinstance(gradient, tf.IndexedSlices):
            tensors += [gradient.values, gradient.indices, gradient.dense_shape]
        elif gradient is not None:
            tensors.append(gradient)
    return tensors


# Operations whose results cost more to keep than to recompute.
_CHEAP = frozenset({"Cast", "Identity", "Reshape", "ExpandDims", "Squeeze", "Shape"})


class _Graph:
    """The graph of a trace, and the operations that can run again."""

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
        """Returns the roots and the operations that they depend on, stopping at `outside`."""
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
        recompute: Callable[[tf.Operation], bool],
        effects: Sequence[tf.Operation] = (),
    ) -> tuple[frozenset[tf.Operation], list[tf.Tensor]]:
        """Returns the operations to run for the targets, and the tensors that they need.

        Args:
            targets: the tensors to compute.
            before: the operations that have already run.
            recompute: returns whether an operation in `before` may run again.
            effects: further operations to run.
        """
        found: set[tf.Operation] = set(effects)
        needed: dict[str, tf.Tensor] = {}
        pending = [*targets, *(tensor for op in effects for tensor in op.inputs)]
        while pending:
            tensor = pending.pop()
            if tensor.name in self._captured:
                continue
            outside = tensor.name in self.inputs or tensor.name in self.seeds
            if outside or (tensor.op in before and not recompute(tensor.op)):
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
        """Makes a part from operations; tensors that they do not compute are fed."""
        computed = {op for op in operations if op.type != "Placeholder"}
        feeds: dict[str, tf.Tensor] = {}
        for tensor in [*(t for op in computed for t in op.inputs), *fetches, *sums]:
            if tensor.op not in computed and tensor.name not in self._captured:
                feeds[tensor.name] = tensor
        unique, added = ({t.name: t for t in some} for some in (fetches, sums))
        ordered = sorted(feeds.values(), key=lambda t: t.name)
        return Part(
            frozenset(computed), tuple(ordered), tuple(unique.values()), tuple(added.values())
        )

    def free(self, op: tf.Operation) -> bool:
        """Whether running an operation again costs almost nothing and yields the same result."""
        if op not in self._free:
            self._free[op] = False  # Ends the recursion at cycles, as in loops.
            self._free[op] = self._is_free(op)
        return self._free[op]

    def without_effect(self, op: tf.Operation) -> bool:
        """Whether running an operation again yields the same result."""
        if op in self._effects or op.type == "Placeholder":
            return False
        return not any(t.name in self._written for t in op.inputs)

    def _is_free(self, op: tf.Operation) -> bool:
        if op.type == "Const":
            return True
        if op.type == "ReadVariableOp":
            return op.inputs[0].name in self._captured and op.inputs[0].name not in self._written
        return op.type in _CHEAP and all(self.free(t.op) for t in op.inputs)


def make_function(
    trace: Trace,
    part: Part,
    name: str,
    accumulators: Mapping[str, Sequence[tf.Variable]],
    *,
    jit: bool = False,
) -> Callable[[Sequence[Any]], list[Any]]:
    """Makes a function that runs a part of a traced graph.

    Args:
        trace: the stage's trace.
        part: the operations with their feeds and fetches.
        name: the name shown in profiles.
        accumulators: for each of `part.sums`, by name: the variables to which to add it.
        jit: whether XLA compiles the function.

    Returns:
        A function of tensors for `part.feeds`, in order. It returns tensors for `part.fetches` and
        a tensor to wait for. While a graph is traced, each call adds one operation to the graph.
    """
    definition = _definition(trace, part)
    consumed = {name for op in part.operations for name in (t.name for t in op.inputs)}
    operations = part.operations

    def run(*tensors: tf.Tensor) -> list[tf.Tensor]:
        graph = tf.compat.v1.get_default_graph()
        here = map(graph.capture, tensors)
        given = dict(zip((t.name for t in part.feeds), here, strict=True))
        results = [*part.fetches, *part.sums]
        for inner in sorted(consumed | {t.name for t in results}):
            if inner in trace.captured:
                given[inner] = graph.capture(trace.captured[inner])
        computed = [t for t in results if t.op in operations]
        imported = tf.graph_util.import_graph_def(
            definition,
            input_map={name: t for name, t in given.items() if name in consumed},
            return_elements=[t.name for t in computed],
            name="part",
        )
        given.update(zip((t.name for t in computed), imported or (), strict=True))
        added = [
            accumulator.assign_add(given[t.name], read_value=False)
            for t in part.sums
            for accumulator in accumulators[t.name]
        ]
        with tf.control_dependencies(added):
            return [*(_shaped(given[t.name], t) for t in part.fetches), tf.zeros([])]

    run.__name__ = name
    specs = [tf.TensorSpec(t.shape, t.dtype) for t in part.feeds]
    # If inlined, the function would be optimized again at every call site.
    function = tf.function(
        compiled_between_collectives(run) if jit else run,
        autograph=False,
        experimental_attributes={"_noinline": True},
    )
    concrete = function.get_concrete_function(*specs)
    return lambda tensors: list(concrete(*tensors))


def _shaped(tensor: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    # An imported graph lacks the shapes that were set in Python.
    result = tf.identity(tensor)
    result.set_shape(like.shape)
    return result


def _definition(trace: Trace, part: Part) -> tf.compat.v1.GraphDef:
    """Returns the part's nodes, with the control dependencies between them."""
    names = {op.name for op in part.operations}
    whole = trace.graph.as_graph_def()
    definition = tf.compat.v1.GraphDef(library=whole.library, versions=whole.versions)
    for node in whole.node:
        if node.name not in names:
            continue
        copy = definition.node.add()
        copy.CopyFrom(node)
        copy.attr.pop("_class", None)
        inputs = [i for i in copy.input if not i.startswith("^") or i[1:] in names]
        del copy.input[:]
        copy.input.extend(inputs)
    return definition
