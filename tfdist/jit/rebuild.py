"""Adds a traced graph to another one, with its clusters as compiled functions."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.internals.graphs import add_control_inputs, graph_of_function
from tfdist.jit.cluster_function import Cluster, add_operations
from tfdist.jit.clusters import Unit, divide, exchanging_lists
from tfdist.jit.left_out import CONDITIONALS, device_of, left_out, node_communicates
from tfdist.jit.program import Program, called_by

_INPUT = "Placeholder"
_numbers = itertools.count()


class Rebuilt:
    """A graph that is added to the default one.

    Args:
        graph: a `FuncGraph`.
        results: the tensors that are wanted of it.
        given: the values of its placeholders, by their names.
        fits: whether this step's rows are as those for which clusters are compiled, a bool scalar;
            None if that is not known.
        within: as for `left_out`.
    """

    def __init__(
        self,
        graph: Any,
        results: Sequence[tf.Tensor],
        given: Mapping[str, tf.Tensor],
        fits: tf.Tensor | None,
        *,
        within: bool = False,
    ) -> None:
        self._graph, self._fits = graph, fits
        self._results = list(results)
        self._program = Program(graph, results)
        self._left_out = left_out(self._program, within=within)
        self._units = divide(self._program, self._left_out)
        while lists := exchanging_lists(self._program, self._units, results):
            self._left_out |= lists
            self._units = divide(self._program, self._left_out)
        self._given: dict[str, tf.Tensor] = dict(given)
        self._made: dict[Any, Any] = {}  # for each operation, what stands for it in the new graph
        self._users: dict[str, set[Any]] = {}
        for op in self._program.operations:
            for tensor in op.inputs:
                self._users.setdefault(tensor.name, set()).add(op)

    def add(self) -> list[tf.Tensor]:
        """Adds the graph; returns the results, which wait for all that it has to run."""
        together: list[Any] = []
        for unit in self._units:
            if not unit.compiled:
                for op in unit.operations:
                    if op.type == _INPUT:
                        continue
                    if self._has_collectives(op):
                        self._add_left_out(together)
                        together = []
                        self._add_conditional(op)
                    else:
                        together.append(op)
                continue
            self._add_left_out(together)
            together = []
            self._add_cluster(unit)
        constant = [t for t in self._results if t.op in self._program.constant]
        self._add_left_out(together, constant)
        ends = [self._made[op] for op in self._graph.control_outputs if op in self._made]
        with tf.control_dependencies(list(dict.fromkeys(ends))):
            return [tf.identity(self._given[t.name]) for t in self._results]

    def _add_left_out(self, operations: Sequence[Any], constant: Sequence[Any] = ()) -> None:
        made = add_operations(self._program, operations, self._given, constants=constant)
        inside = set(operations)
        for op, new in zip(operations, made, strict=True):
            self._made[op] = new
        for op in operations:
            before = [o for o in op.control_inputs if o not in inside]
            add_control_inputs(self._made[op], self._standing_for(before))

    def _add_cluster(self, unit: Unit) -> None:
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
            tf.control_dependencies(self._standing_for(before)),
            tf.device(device_of(unit.operations[0])),
        ):
            if not cluster.varies:
                results = cluster.make_function(name, resources, jit=True)(*tensors)
            elif self._fits is None:
                results = cluster.make_function(name, resources, jit=False)(*tensors)
            else:
                results = tf.cond(
                    self._fits,
                    lambda: cluster.make_function(name, resources, jit=True)(*tensors),
                    lambda: cluster.make_function(name, resources, jit=False)(*tensors),
                )
        for tensor, value in zip(cluster.fetches, results, strict=False):
            value.set_shape(tensor.shape)
            self._given[tensor.name] = value
        self._made.update(dict.fromkeys(unit.operations, results[-1].op))

    def _has_collectives(self, op: Any) -> bool:
        calls = set(called_by(op.node_def))
        return op.type in CONDITIONALS and bool(
            calls & self._program.functions_with(node_communicates)
        )

    def _add_conditional(self, op: Any) -> None:
        """A conditional with collectives in its branches, where clusters are compiled as well."""
        condition, *arguments = [self._given[t.name] for t in op.inputs]

        def branch(attribute: str) -> Any:
            name = op.get_attr(attribute).name
            graph = graph_of_function(self._graph, name, [t.shape for t in op.inputs[1:]])

            def build() -> list[tf.Tensor]:
                here = tf.compat.v1.get_default_graph()
                values = [here.capture(value) for value in arguments]
                given = {t.name: value for t, value in zip(graph.inputs, values, strict=True)}
                results = Rebuilt(graph, graph.outputs, given, self._fits, within=True).add()
                with tf.control_dependencies(results):
                    return [*results, tf.zeros([])]

            return build

        with tf.control_dependencies(self._standing_for(op.control_inputs)):
            results = tf.cond(condition, branch("then_branch"), branch("else_branch"))
        for tensor, value in zip(op.outputs, results, strict=False):
            value.set_shape(tensor.shape)
            self._given[tensor.name] = value
        self._made[op] = results[-1].op

    def _standing_for(self, operations: Sequence[Any]) -> list[Any]:
        running = [op for op in operations if op in self._program.before and op.type != _INPUT]
        return list(dict.fromkeys(self._made[op] for op in running))
