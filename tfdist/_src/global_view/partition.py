"""Adds the partitioned copy of a whole-batch program that computes the rows of one worker."""

import contextlib
import dataclasses
import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist._src.global_view.analysis import Analysis
from tfdist._src.global_view.decision import Decision, Value
from tfdist._src.global_view.layout import WHOLE, Layout
from tfdist._src.global_view.resharding import Communication, Resharding, RowShare, WorkerRows
from tfdist._src.internals.graphs import copy_operation, keep_functions_of
from tfdist._src.xla.cluster_function import is_uncompiled

_UPDATE = "TfdistUpdateBegins"
_COLLECTIVES = frozenset(
    {
        "CollectiveGatherV2",
        "CollectiveReduceV2",
        "CollectiveReduceV3",
        "TfdistAllGather",
        "TfdistAllReduce",
        "TfdistCompressedAllReduce",
        "TfdistReduceScatter",
    }
)


@dataclasses.dataclass(frozen=True)
class _Emitted:
    """The operation that is being added, as an argument of its decision's `emit` function."""

    op: Any
    values: Sequence[Value]
    decision: Decision

    @property
    def layouts(self) -> list[Layout]:
        return [v.layout for v in self.values]


Added = list[tuple[list[tf.Tensor], list[tf.Operation]]]


class WorkerEmitter(WorkerRows):
    """Adds operations that compute the rows of one worker.

    Args:
        share: the worker's rows.
        communication: the worker's communication with other workers.
        added: a list that all workers of a process share. It contains the results and the side
            effects of each operation that is added only once per process. None if the process has
            one worker.
        leads: whether this is the first worker of the process. The first worker fills `added`, and
            the other workers read it.

    Attributes:
        effects: the operations that perform the side effects of the operation that was added last.
    """

    def __init__(
        self,
        share: RowShare,
        communication: Communication,
        added: Added | None = None,
        *,
        leads: bool = True,
    ) -> None:
        super().__init__(share, communication)
        self.effects: list[tf.Operation] = []
        self._graph = tf.compat.v1.get_default_graph()
        self._added, self._leads, self._taken = added, leads, 0
        self._adds_parts = False

    def sum_now(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum of all workers' values; the communication is added immediately."""
        (total,) = self.communication.reduce([value], ["sum"])
        total.set_shape(value.shape)
        self.graphs[-1].communicated.append(total)
        return total

    def copy(self, op: Any, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Adds a copy of an operation."""
        keep_functions_of(op)
        operation = copy_operation(op, list(inputs))
        if not operation.outputs:
            self.effects = [operation]
        return list(operation.outputs)

    def once(self, op: Any, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Adds a copy of an operation, or returns the results of the first worker's copy."""
        if self._added is None or tf.compat.v1.get_default_graph() is not self._graph:
            return self.copy(op, inputs)
        if self._leads:
            self._added.append((self.copy(op, inputs), self.effects))
        results, self.effects = self._added[self._taken]
        self._taken += 1
        return list(results)

    def all_add(self, op: Any) -> bool:
        """Returns whether it is certain that all replicas of the process add a collective.

        A compressed sum consists of several collectives, and some replicas may add more of them
        than others. Each replica adds at least one, so only the first one is certain.
        """
        if not is_uncompiled(op):
            return True
        before, self._adds_parts = self._adds_parts, True
        return not before

    def inline(
        self, part: Analysis, inputs: Sequence[tf.Tensor], layouts: Sequence[Layout] | None = None
    ) -> list[tf.Tensor]:
        """Adds the partitioned operations of a function."""
        partition = Partition(part, self)
        results = partition.add(inputs, layouts)
        self.effects = partition.effects()
        return results

    def branch(self, call: _Emitted, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Adds a conditional."""
        condition, *arguments = inputs
        layouts = list(call.decision.outputs)

        def function(part: Analysis) -> Callable[[], Any]:
            def run() -> Any:
                results = Partition(part, self).add(arguments, layouts)
                return [*results, tf.zeros([])]

            return run

        functions = [function(part) for part in call.decision.parts]
        if "Case" in call.op.type:
            results = tf.switch_case(condition, functions)
        else:
            if condition.shape.rank != 0 or condition.dtype != tf.bool:
                condition = tf.reshape(tf.cast(condition, tf.bool), [])
            results = tf.cond(condition, *functions)
        self.effects = [results[-1].op]
        return _with_shapes(call, results[:-1])

    def repeat(self, call: _Emitted, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Adds a loop."""
        condition, body = call.decision.parts
        graph = body.graph
        layouts = list(call.decision.outputs)
        fixed = [a is b for a, b in zip(graph.outputs, graph.inputs, strict=True)]
        varying = [i for i, same in enumerate(fixed) if not same]

        def all_values(given: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            values = list(inputs)
            for i, value in zip(varying, given, strict=True):
                values[i] = value
            return values

        def loop_condition(*given: tf.Tensor) -> tf.Tensor:
            (result,) = Partition(condition, self).add(all_values(given), [WHOLE])
            return tf.reshape(result, [])

        def loop_body(*given: tf.Tensor) -> list[tf.Tensor]:
            results = Partition(body, self).add(all_values(given), layouts)
            for i in varying:
                _refine(results[i], graph.inputs[i], layouts[i])
            return [results[i] for i in varying]

        shapes = [_invariant(graph.inputs[i], layouts[i]) for i in varying]
        results = tf.while_loop(
            loop_condition,
            loop_body,
            [inputs[i] for i in varying],
            shape_invariants=shapes,
            parallel_iterations=int(call.op.get_attr("parallel_iterations")),
        )
        self.effects = []
        return all_values(results)


def _invariant(tensor: tf.Tensor, layout: Layout) -> tf.TensorShape:
    if tensor.shape.rank is None or layout.kind != "rows" or tensor.dtype == tf.variant:
        return tensor.shape
    sizes = tensor.shape.as_list()
    sizes[layout.axis] = None
    return tf.TensorShape(sizes)


def _refine(value: tf.Tensor, tensor: tf.Tensor, layout: Layout) -> None:
    """Sets the static shape of a partitioned tensor as in its graph, except along the rows."""
    if tensor.dtype in (tf.variant, tf.resource) or layout.kind not in ("whole", "rows", "partial"):
        return
    if tf.is_symbolic_tensor(value) and not value.shape.is_fully_defined():
        value.set_shape(_invariant(tensor, layout))


def _with_shapes(call: _Emitted, results: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    for tensor, value, layout in zip(call.op.outputs, results, call.decision.outputs, strict=True):
        if layout.kind != "rows":
            value.set_shape(tensor.shape)
    return list(results)


class Partition:
    """Adds a partitioned copy of a graph to the default graph.

    Operations are added as early as possible. Values are communicated only when all remaining
    operations have to wait for other workers. All values that can be communicated at this point
    are then communicated together.

    Args:
        analysis: the graph and its layouts.
        emitter: adds the operations for the worker.
        known: maps the `ref()` of some tensors to their values for the whole batch.
    """

    def __init__(
        self,
        analysis: Analysis,
        emitter: WorkerEmitter,
        known: Mapping[Any, tf.Tensor] | None = None,
    ) -> None:
        self._analysis, self._emitter = analysis, emitter
        self._tensors = Resharding(analysis, emitter, known)
        self._made: dict[Any, list[Any]] = {}
        outputs = {t.op for t in analysis.results}
        self._results = {op for op in outputs if op.type == "Identity"}

    def add(
        self, inputs: Sequence[tf.Tensor], layouts: Sequence[Layout] | None = None
    ) -> list[tf.Tensor]:
        """Adds the operations of the graph.

        Args:
            inputs: the values of the graph's inputs, as this worker holds them.
            layouts: the required layouts of the results; by default, the layouts that they have.

        Returns:
            The values of `analysis.results`.
        """
        self._emitter.graphs.append(self._tensors)
        try:
            return self._add_all(inputs, layouts)
        finally:
            self._emitter.graphs.pop()

    def effects(self) -> list[tf.Operation]:
        """Returns the copies of the graph's control outputs; callers of the graph wait for them."""
        graph = self._analysis.graph
        return [op for control in graph.control_outputs for op in self._made.get(control, ())]

    def made(self, op: Any) -> list[Any]:
        """Returns the operations that were added for an operation of the original graph."""
        return list(self._made.get(op, ()))

    def _add_all(
        self, inputs: Sequence[tf.Tensor], layouts: Sequence[Layout] | None
    ) -> list[tf.Tensor]:
        graph = self._analysis.graph
        for tensor, value in zip(graph.inputs, inputs, strict=True):
            self._tensors.values[id(tensor)] = value
        wanted = layouts or [v.layout for v in self._analysis.outputs]
        pairs = list(zip(self._analysis.results, wanted, strict=True))
        self._tensors.note_wanted(pairs)
        self._run(pairs)
        missing = [t for t, layout in pairs if self._tensors.waits_for(t, layout)]
        self._tensors.communicate(missing)
        return [self._tensors.in_layout(tensor, layout) for tensor, layout in pairs]

    def _run(self, results: Sequence[tuple[tf.Tensor, Layout]]) -> None:
        """Adds all operations; communicates available results before updates begin."""
        operations = self._analysis.operations
        numbers = {op: i for i, op in enumerate(operations)}
        users: dict[Any, list[Any]] = {op: [] for op in operations}
        waiting: dict[Any, int] = {}
        ready: list[int] = []
        for op in operations:
            before = {t.op for t in op.inputs} | set(self._controls(op))
            sources = [o for o in before if o in numbers]
            waiting[op] = len(sources)
            for source in sources:
                users[source].append(op)
            if not sources:
                ready.append(numbers[op])
        heapq.heapify(ready)
        parked: list[Any] = []
        collectives: list[Any] = []
        updates: list[Any] = []
        released: set[Any] = set()
        while ready or parked or collectives or updates:
            if ready:
                op = operations[heapq.heappop(ready)]
                if self._missing(op):
                    parked.append(op)
                elif op.type in _COLLECTIVES and op not in released:
                    collectives.append(op)
                elif op.type == _UPDATE and op not in released:
                    updates.append(op)
                else:
                    self._add(op, self._tensors.communicated if op.type == _UPDATE else ())
                    for user in users[op]:
                        waiting[user] -= 1
                        if waiting[user] == 0:
                            heapq.heappush(ready, numbers[user])
                continue
            missing = [t for op in parked for t in self._missing(op)]
            missing += [
                tensor
                for tensor, layout in results
                if id(tensor) in self._tensors.values and self._tensors.waits_for(tensor, layout)
            ]
            self._tensors.communicate(missing)
            # Parked operations, which wait for communicated operands, are added first: their
            # operands are small and available early. The program's own collectives are next, and
            # updates are last.
            if parked:
                again, parked = parked, []
            elif collectives:
                again, collectives = collectives, []
            else:
                again, updates = updates, []
            released.update(again)
            ready = sorted(numbers[op] for op in again)

    def _controls(self, op: Any) -> Sequence[Any]:
        """Returns the control inputs that the copy of an operation waits for."""
        # In a function, TensorFlow makes the identities of the results wait for all side effects.
        # The copies need not wait: the graph that they are added to makes its own results wait.
        return () if op in self._results else op.control_inputs

    def _missing(self, op: Any) -> list[tf.Tensor]:
        """Returns the operands of an operation that still have to be communicated."""
        wanted = self._analysis.decisions[op].inputs
        return [
            tensor
            for tensor, layout in zip(op.inputs, wanted, strict=True)
            if layout is not None and self._tensors.waits_for(tensor, layout)
        ]

    def _add(self, op: Any, after: Sequence[Any] = ()) -> None:
        decision = self._analysis.decisions[op]
        inputs = [
            self._tensors.values[id(t)] if layout is None else self._tensors.in_layout(t, layout)
            for t, layout in zip(op.inputs, decision.inputs, strict=True)
        ]
        for i, element in decision.local_shapes.items():
            inputs[i] = self._tensors.local_shape(op, i, element, inputs[i])
        before = [o for control in self._controls(op) for o in self._made.get(control, ())]
        before += after
        with contextlib.ExitStack() as scopes:
            if before:
                scopes.enter_context(tf.control_dependencies(before))
            if op.device:
                scopes.enter_context(tf.device(op.device))
            if op.type in _COLLECTIVES:
                self._emitter.communicated.append((self._analysis.graph, op))
                if self._emitter.all_add(op):
                    self._emitter.communication.begin()
            if decision.emit is None:
                results = self._emitter.copy(op, inputs) if op.outputs else self._effect(op, inputs)
            else:
                values = [self._analysis.value_of(t) for t in op.inputs]
                self._emitter.effects = []
                results = decision.emit(self._emitter, _Emitted(op, values, decision), inputs)
                made = [r.op for r in results if tf.is_symbolic_tensor(r)]
                self._made[op] = [*made, *self._emitter.effects]
        if decision.emit is None and op.outputs:
            self._made[op] = [results[0].op]
        self._emitter.report_needed_rows(lambda: [self._tensors.values[id(t)] for t in op.inputs])
        for tensor, value in zip(op.outputs, results, strict=True):
            _refine(value, tensor, self._analysis.value_of(tensor).layout)
            self._tensors.values[id(tensor)] = value

    def _effect(self, op: Any, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        keep_functions_of(op)
        self._made[op] = [copy_operation(op, list(inputs))]
        return []
