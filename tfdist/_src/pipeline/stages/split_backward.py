"""Cuts the graph of a stage's passes into functions that run at different times.

The first part is the forward pass. The backward pass is the second part, or it is split into two
parts (Qi et al., "Zero bubble pipeline parallelism", 2023). If it is split, the first of these
parts computes the gradients of the stage's inputs, for which earlier stages wait. The other part
computes the gradients of the variables, for which no stage waits.

If a part needs a tensor that an earlier part has computed, the tensor is kept and passed to it.
There is one exception: constants, values of variables, and casts of these are computed again, since
this costs almost nothing.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist._src.pipeline.stages.trace import Trace
from tfdist._src.xla import compiled_between_collectives


@dataclass(frozen=True)
class Part:
    """A part of a graph: operations that run together.

    Attributes:
        operations: the operations.
        feeds: the tensors that the operations need but do not compute.
        fetches: the tensors that the part returns.
        sums: the tensors that the part adds to accumulators, such as the gradients of variables.
            They are summed over the microbatches.
    """

    operations: frozenset[tf.Operation]
    feeds: tuple[tf.Tensor, ...]
    fetches: tuple[tf.Tensor, ...]
    sums: tuple[tf.Tensor, ...] = ()


@dataclass(frozen=True)
class Parts:
    """The parts of a stage's passes.

    Attributes:
        forward: the forward pass.
        input_gradient: the first part of the backward pass, or the whole backward pass if it is not
            split. None if the stage has no backward pass.
        weight_gradient: the second part of the backward pass; None if it is not split.
    """

    forward: Part
    input_gradient: Part | None = None
    weight_gradient: Part | None = None


def split_passes(trace: Trace, *, split: bool = False, remat: bool = False) -> Parts:
    """Cuts the trace of a stage into parts.

    Args:
        trace: the trace.
        split: whether the backward pass is split, so that the gradients of the variables form a
            separate part.
        remat: whether the backward pass runs the operations of the forward pass again, so that
            their results need not be kept in memory.
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
    """Returns the part that computes the results of a forward pass, without its side effects.

    Args:
        trace: the trace of a forward pass, made by `trace_forward`.
        outside: a function that returns whether to exclude an operation from the part. The outputs
            of an excluded operation become feeds of the part.
    """
    graph = _Graph(trace)
    return graph.part(graph.ancestors([t.op for t in trace.others], outside), trace.others)


def flatten(gradients: Iterable[Any]) -> list[tf.Tensor]:
    """Returns the tensors in a list of gradients.

    A gradient may be a tensor, `tf.IndexedSlices` with three tensors, or None, which has no
    tensors.
    """
    tensors = []
    for gradient in gradients:
        if isinstance(gradient, tf.IndexedSlices):
            tensors += [gradient.values, gradient.indices, gradient.dense_shape]
        elif gradient is not None:
            tensors.append(gradient)
    return tensors


# Operations that are so cheap that it is better to run them again than to keep their results.
_CHEAP = frozenset({"Cast", "Identity", "Reshape", "ExpandDims", "Squeeze", "Shape"})


class _Graph:
    """The graph of a trace. Its methods find the operations that belong to a part."""

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
        """Returns the given operations, and all operations on which they depend.

        Args:
            roots: the operations.
            outside: a function that returns whether to exclude an operation. The operations on
                which only excluded operations depend are excluded as well.
        """
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
        """Returns the operations that compute some tensors from the results of earlier parts.

        Args:
            targets: the tensors to compute.
            before: the operations of earlier parts, which have already run.
            recompute: a function that returns whether an operation in `before` may run again. If
                not, its result must be passed to this part.
            effects: operations with side effects, which this part must also run.

        Returns:
            The operations of this part, and the tensors that must be passed to it.
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
        """Makes a part from operations.

        Args:
            operations: the operations.
            fetches: the tensors that the part returns.
            sums: the tensors that the part adds to accumulators.

        Returns:
            The part. Its feeds are all tensors that the part needs but does not compute.
        """
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
        """Whether it costs almost nothing to run an operation again, with the same result."""
        if op not in self._free:
            self._free[op] = False  # This ends the recursion if the graph has a cycle (a loop).
            self._free[op] = self._is_free(op)
        return self._free[op]

    def without_effect(self, op: tf.Operation) -> bool:
        """Whether an operation can run again, with the same result and without a side effect."""
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
        part: the part.
        name: the name of the function in profiles.
        accumulators: for each tensor in `part.sums`, by its name, the variables to which the tensor
            is added.
        jit: whether XLA compiles the function.

    Returns:
        A function of a list of tensors, one for each of `part.feeds`. It returns a list of tensors,
        one for each of `part.fetches`, followed by a tensor that becomes available when the part
        has run. If the function is called while a graph is traced, it adds one operation to the
        graph.
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
    # Static shapes that were set in Python are lost when a graph is imported.
    result = tf.identity(tensor)
    result.set_shape(like.shape)
    return result


def _definition(trace: Trace, part: Part) -> tf.compat.v1.GraphDef:
    """Returns a GraphDef with the nodes of a part and the control dependencies among them."""
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
