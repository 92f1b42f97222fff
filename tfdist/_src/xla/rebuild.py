"""Adds a traced graph to another graph, with a call of a compiled function for each cluster."""

import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist._src import native
from tfdist._src.comm import tokens
from tfdist._src.internals import graphs
from tfdist._src.xla import clusters
from tfdist._src.xla.cluster_function import Cluster, add_operations
from tfdist._src.xla.program import TracedProgram, called_by, has_shape
from tfdist.errors import NativeUnavailableError

_INPUT = "Placeholder"
_numbers = itertools.count()


class ClusteredGraph:
    """A graph that is divided into clusters, and is then added to the default graph.

    Args:
        graph: a `FuncGraph`.
        results: the tensors to compute.
        given: maps the names of the graph's placeholders to their values.
        fits: whether this step has the shapes that clusters are compiled for, a bool scalar; None
            if this is unknown.
        own: the names of the placeholders for this worker's own values. All other values may have
            to be equal on all workers.
        copies: whether variables have equal copies on several devices of the same kind. If so,
            operations with results that may have to be equal are not compiled, because the devices'
            programs may differ.
        is_branch: as for `excluded_operations`.
    """

    def __init__(
        self,
        graph: Any,
        results: Sequence[tf.Tensor],
        given: Mapping[str, tf.Tensor],
        fits: tf.Tensor | None,
        *,
        own: Collection[str],
        copies: bool = False,
        is_branch: bool = False,
    ) -> None:
        self._graph, self._fits = graph, fits
        self._results = list(results)
        self._program = TracedProgram(graph, results)
        given_here = {op for op in self._program.operations if op.type == _INPUT}
        own_inputs = {op for op in given_here if op.outputs[0].name in own}
        self._own = clusters.own_operations(self._program, own_inputs, self._results)
        self._copies = copies or clusters.has_several_of_a_kind(self._program)
        self._excluded = clusters.excluded_operations(self._program, is_branch=is_branch)
        if self._copies:
            self._excluded |= set(self._program.operations) - self._own
        self._units = clusters.divide(self._program, self._excluded, self._own)
        while lists := clusters.exchanging_lists(self._program, self._units, results):
            self._excluded |= lists
            self._units = clusters.divide(self._program, self._excluded, self._own)
        self._given: dict[str, tf.Tensor] = dict(given)
        self._made: dict[Any, Any] = {}  # from operations to their equivalents in the new graph
        self._users: dict[str, set[Any]] = {}
        for op in self._program.operations:
            for tensor in op.inputs:
                self._users.setdefault(tensor.name, set()).add(op)

    def add(self) -> list[tf.Tensor]:
        """Adds the operations of the graph to the default graph.

        Returns:
            The results, and one more tensor that callers without results can wait for. All of them
            wait for the side effects of the graph.
        """
        together: list[Any] = []
        for unit in self._units:
            if not unit.compiled:
                for op in unit.operations:
                    if op.type == _INPUT:
                        continue
                    if self._has_collectives(op):
                        self._add_uncompiled(together)
                        together = []
                        self._add_conditional(op)
                    else:
                        together.append(op)
                continue
            self._add_uncompiled(together)
            together = []
            self._add_cluster(unit)
        constant = [t for t in self._results if t.op in self._program.constant]
        self._add_uncompiled(together, constant)
        ends = [self._made[op] for op in self._graph.control_outputs if op in self._made]
        with tf.control_dependencies(list(dict.fromkeys(ends))):
            return [*(tf.identity(self._given[t.name]) for t in self._results), tf.zeros([])]

    def _add_uncompiled(self, operations: Sequence[Any], constant: Sequence[Any] = ()) -> None:
        made = add_operations(self._program, operations, self._given, constants=constant)
        inside = set(operations)
        for op, new in zip(operations, made, strict=True):
            self._made[op] = new
        for op in operations:
            before = [o for o in op.control_inputs if o not in inside]
            graphs.add_control_inputs(self._made[op], self._equivalents_of(before))

    def _add_cluster(self, unit: clusters.Unit) -> None:
        inside = set(unit.operations)
        wanted = {t.name for t in self._results}

        def is_used(tensor: tf.Tensor) -> bool:
            return tensor.name in wanted or bool(self._users.get(tensor.name, set()) - inside)

        cluster = Cluster(self._program, unit.operations, is_used)
        name = f"cluster_{next(_numbers)}"
        resources = [self._given[t.name] for t in cluster.resources]
        tensors = [self._given[t.name] for t in cluster.feeds]
        before = [o for op in unit.operations for o in op.control_inputs if o not in inside]
        with (
            tf.control_dependencies(self._equivalents_of(before)),
            tf.device(self._program.device_of(unit.operations[0])),
        ):
            # Results that have to be equal on all workers must be compiled on all of them or on
            # none, but `fits` may differ between workers.
            fits = self._fits if unit.own else None
            results = cluster.call(name, resources, tensors, fits)
        for tensor, value in zip(cluster.fetches, results, strict=False):
            value.set_shape(tensor.shape)
            self._given[tensor.name] = value
        self._made.update(dict.fromkeys(unit.operations, results[-1].op))

    def _has_collectives(self, op: Any) -> bool:
        calls = set(called_by(op.node_def))
        return op.type in clusters.CONDITIONALS and bool(
            calls & self._program.functions_with(clusters.node_communicates)
        )

    def _add_conditional(self, op: Any) -> None:
        """Adds a conditional that has collectives; its branches are also divided into clusters."""
        self._add_uncompiled([], [t for t in op.inputs if t.op in self._program.constant])
        condition, *arguments = [self._given[t.name] for t in op.inputs]

        def branch(graph: Any) -> Any:
            pairs = list(zip(graph.inputs, op.inputs[1:], strict=True))
            own = {inner.name for inner, outer in pairs if outer.op in self._own}

            def build() -> list[tf.Tensor]:
                here = tf.compat.v1.get_default_graph()
                values = [here.capture(value) for value in arguments]
                given = {t.name: value for t, value in zip(graph.inputs, values, strict=True)}
                inner = ClusteredGraph(
                    graph,
                    graph.outputs,
                    given,
                    self._fits,
                    own=own,
                    copies=self._copies,
                    is_branch=True,
                )
                return inner.add()

            return build

        with tf.control_dependencies(self._equivalents_of(op.control_inputs)):
            results = tf.cond(condition, *map(branch, graphs.branches_of(op)))
        for tensor, value in zip(op.outputs, results, strict=False):
            value.set_shape(tensor.shape)
            self._given[tensor.name] = value
        self._made[op] = results[-1].op

    def _equivalents_of(self, operations: Sequence[Any]) -> list[Any]:
        running = [op for op in operations if op in self._program.before and op.type != _INPUT]
        return list(dict.fromkeys(self._made[op] for op in running))


def compiled_between_collectives(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lets XLA compile the computation between a function's collectives.

    Args:
        function: a function that is called while a `tf.function` is traced.

    Returns:
        A function with the same arguments and results.
    """

    def run(*arguments: Any) -> Any:
        outer = tf.compat.v1.get_default_graph()
        graph = graphs.trace_for_xla(lambda: function(*arguments))
        graphs.keep_functions(outer, graph)
        structure = graph.structured_outputs
        flat = tf.nest.flatten(structure, expand_composites=True)
        given = {inside.name: outer.capture(outside) for outside, inside in graph.captures}
        own = {inside.name for outside, inside in graph.captures if _is_own(outside)}
        tensors = [t for t in flat if isinstance(t, tf.Tensor)]
        results = iter(ClusteredGraph(graph, tensors, given, _fits(given), own=own).add())
        flat = [next(results) if isinstance(t, tf.Tensor) else t for t in flat]
        return tf.nest.pack_sequence_as(structure, flat, expand_composites=True)

    return run


def _is_own(tensor: tf.Tensor) -> bool:
    """Whether a captured tensor belongs to the data of a step, which each worker has for itself."""
    return has_shape(tensor) and bool(tf.is_symbolic_tensor(graphs.captured_from(tensor)))


def _fits(given: dict[str, tf.Tensor]) -> tf.Tensor | None:
    """Returns whether clusters are compiled for the shapes of this step's tensors.

    Returns:
        A bool scalar; None if all shapes are static, or if the native library is missing.
    """
    tensors = [t for t in given.values() if has_shape(t)]
    varying = [t for t in tensors if not t.shape.is_fully_defined()]
    if not varying:
        return None
    try:
        ops = native.load_ops()
    except NativeUnavailableError:
        return None
    host = str(tf.config.list_logical_devices("CPU")[0].name)
    shapes = [tf.shape(t, tf.int64) for t in varying]  # These run on the devices of the tensors.
    with tf.device(host):
        return ops.tfdist_shapes_fit(order=_order(host), shapes=shapes)


@functools.cache
def _order(host: str) -> tf.Tensor:
    return tokens.make(host, tf.float32)
