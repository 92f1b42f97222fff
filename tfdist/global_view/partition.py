"""Adds a program for the whole batch to a graph, partitioned for the rows of one worker."""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfdist.errors import UnsupportedError
from tfdist.global_view.analysis import Analysis, needs_others
from tfdist.global_view.decision import Decision, Value
from tfdist.global_view.layout import ONE, WHOLE, Dim, Layout, Symbol
from tfdist.internals.graphs import copy_operation, keep_functions_of
from tfdist.internals.tensorflow import element_type
from tfdist.jit import is_compiled_here, or_zeros

_UPDATE = "TfdistUpdateBegins"
_CANNOT_CUT = "A batch of one row is broadcast to another size. Use batches of more rows. Size:"
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


class Communication(Protocol):
    """How workers combine what they hold. All workers make the same calls in the same order."""

    def reduce(self, tensors: Sequence[tf.Tensor], hows: Sequence[str]) -> list[tf.Tensor]:
        """The reductions of tensors over the workers: "sum", "min", "max", "product", …"""

    def gather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Concatenates the first axes of all workers' tensors, whose sizes may differ."""

    def begin(self) -> None:
        """Called before a collective of the program itself is added."""


@dataclasses.dataclass(frozen=True)
class Share:
    """One worker's rows of a batch.

    Attributes:
        rows: the number of rows that it computes with, at least 1, an int32 scalar.
        total: the number of rows of the batch, an int32 scalar.
        first: the number of its first row, an int32 scalar; of any row for a worker without rows.
        counts: whether its rows are its own, a bool scalar; otherwise it has none, and computes
            with a substitute. None if it is known to have rows.
        leads: whether it has the first row of the batch, a bool scalar.
        is_first: whether it is the first of all workers, a bool scalar.
    """

    rows: tf.Tensor
    total: tf.Tensor
    first: tf.Tensor
    counts: tf.Tensor | None
    leads: tf.Tensor
    is_first: tf.Tensor


@dataclasses.dataclass(frozen=True)
class _Emitted:
    """An operation that is being added, for the functions that add it in another way."""

    op: Any
    values: Sequence[Value]
    decision: Decision

    @property
    def layouts(self) -> list[Layout]:
        return [v.layout for v in self.values]


class Lane:
    """What the operations of one worker are made with.

    Args:
        share: the worker's rows.
        communication: how it communicates.
    """

    def __init__(self, share: Share, communication: Communication) -> None:
        self.share, self.communication = share, communication
        self._made: dict[Any, tf.Tensor] = {}
        self.partitions: list[Partition] = []  # that are being added, the innermost one last
        self.effects: list[tf.Operation] = []  # of functions that are being added

    def constant(self, key: Any, make: Callable[[], tf.Tensor]) -> tf.Tensor:
        """A value that is computed once in a graph, from no operand.

        Args:
            key: names the value.
            make: computes it.
        """
        key = (id(tf.compat.v1.get_default_graph()), key)
        if key not in self._made:
            with tf.control_dependencies(None):
                self._made[key] = make()
        return self._made[key]

    def own_rows(self, dtype: Any, times: int = 1) -> tf.Tensor:
        """The number of rows that this worker computes with, times an integer."""
        return self.constant(
            ("own", dtype, times), lambda: tf.cast(self.share.rows, dtype) * tf.cast(times, dtype)
        )

    def all_rows(self, dtype: Any, times: int = 1) -> tf.Tensor:
        """The number of rows of the batch, times an integer."""
        return self.constant(
            ("all", dtype, times), lambda: tf.cast(self.share.total, dtype) * tf.cast(times, dtype)
        )

    def first_row(self, dtype: Any, times: int = 1) -> tf.Tensor:
        """The number of this worker's first row, times an integer."""
        return self.constant(
            ("first", dtype, times),
            lambda: tf.cast(self.share.first, dtype) * tf.cast(times, dtype),
        )

    def own_shape(
        self, dtype: Any, sizes: tuple[int | None, ...], axis: int, times: int
    ) -> tf.Tensor:
        """A shape with the number of own rows, times an integer, on an axis."""
        return self.constant(
            ("own shape", dtype, sizes[:axis], sizes[axis + 1 :], times),
            lambda: _shape_with(self.own_rows(dtype, times), sizes, axis),
        )

    def whole_shape(
        self, dtype: Any, sizes: tuple[int | None, ...], axis: int, times: int
    ) -> tf.Tensor:
        """The same with the number of all rows."""
        return self.constant(
            ("whole shape", dtype, sizes[:axis], sizes[axis + 1 :], times),
            lambda: _shape_with(self.all_rows(dtype, times), sizes, axis),
        )

    def fraction(self, dtype: Any) -> tf.Tensor:
        """This worker's share of all rows, 0 if it has none."""

        def divide() -> tf.Tensor:
            own = tf.cast(self.share.rows, tf.float64)
            if self.share.counts is not None:
                own *= tf.cast(self.share.counts, tf.float64)
            return tf.cast(own / tf.cast(self.share.total, tf.float64), dtype)

        return self.constant(("fraction", dtype), divide)

    def is_first(self) -> tf.Tensor:
        """Whether this is the first of all workers."""
        return self.share.is_first

    def sum_now(self, value: tf.Tensor) -> tf.Tensor:
        """The sum of all workers' values, communicated where the operation is added."""
        (total,) = self.communication.reduce([value], ["sum"])
        total.set_shape(value.shape)
        self.partitions[-1].communicates(total)
        return total

    def copy(self, op: Any, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Adds a copy of an operation."""
        keep_functions_of(op)
        operation = copy_operation(op, list(inputs))
        if not operation.outputs:
            self.effects = [operation]
        return list(operation.outputs)

    def contribution_of_whole(self, value: tf.Tensor) -> tf.Tensor:
        """What this worker contributes to a sum that is to be a value which all workers hold."""
        return self._chosen(self.share.leads, value, "sum")

    def settled(self, value: tf.Tensor, how: str = "sum") -> tf.Tensor:
        """What this worker contributes to a reduction: nothing if it has no rows."""
        if self.share.counts is None:
            return value
        return self._chosen(self.share.counts, value, how)

    def _chosen(self, condition: tf.Tensor, value: tf.Tensor, how: str) -> tf.Tensor:
        """A value, or what changes nothing in a reduction."""
        neutral = _NEUTRAL[how]
        count = value.shape.num_elements()
        if is_compiled_here() or (count is not None and count <= _FEW):
            dtype = value.dtype
            number = self.constant(("neutral", how, dtype), lambda: neutral(tf.zeros([], dtype)))
            return tf.where(condition, value, number)
        # A conditional copies nothing.
        chosen = tf.cond(condition, lambda: value, lambda: neutral(value))
        chosen.set_shape(value.shape)
        return chosen

    def all_settled(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The same for sums, with one conditional for all."""
        counts = self.share.counts
        return list(values) if counts is None else or_zeros(counts, values)

    def inline(
        self, part: Analysis, inputs: Sequence[tf.Tensor], layouts: Sequence[Layout] | None = None
    ) -> list[tf.Tensor]:
        """Adds the operations of a function."""
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

        def goes_on(*given: tf.Tensor) -> tf.Tensor:
            (result,) = Partition(condition, self).add(all_values(given), [WHOLE])
            return tf.reshape(result, [])

        def again(*given: tf.Tensor) -> list[tf.Tensor]:
            results = Partition(body, self).add(all_values(given), layouts)
            for i in varying:
                _refine(results[i], graph.inputs[i], layouts[i])
            return [results[i] for i in varying]

        shapes = [_invariant(graph.inputs[i], layouts[i]) for i in varying]
        results = tf.while_loop(
            goes_on,
            again,
            [inputs[i] for i in varying],
            shape_invariants=shapes,
            parallel_iterations=int(call.op.get_attr("parallel_iterations")),
        )
        self.effects = []
        return all_values(results)


_NEUTRAL: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "sum": tf.zeros_like,
    "product": tf.ones_like,
    "max": lambda x: tf.fill(tf.shape(x), _extreme(x.dtype, -1)),
    "min": lambda x: tf.fill(tf.shape(x), _extreme(x.dtype, 1)),
    "all": tf.ones_like,
    "any": tf.zeros_like,
    "stack": tf.zeros_like,
}
_FEW = 1024


def _extreme(dtype: Any, sign: int) -> tf.Tensor:
    """The smallest or largest number of a type."""
    if dtype.is_floating:
        return tf.constant(sign * float("inf"), dtype)
    return tf.constant(dtype.min if sign < 0 else dtype.max, dtype)


def _shape_with(size: tf.Tensor, sizes: Sequence[int | None], axis: int) -> tf.Tensor:
    parts = [size if k == axis else tf.constant(n, size.dtype) for k, n in enumerate(sizes)]
    return tf.stack(parts)


def _invariant(tensor: tf.Tensor, layout: Layout) -> tf.TensorShape:
    if tensor.shape.rank is None or layout.kind != "rows" or tensor.dtype == tf.variant:
        return tensor.shape
    sizes = tensor.shape.as_list()
    sizes[layout.axis] = None
    return tf.TensorShape(sizes)


def _refine(value: tf.Tensor, tensor: tf.Tensor, layout: Layout) -> None:
    """Tells the static sizes of a tensor of the graph to its counterpart."""
    if tensor.dtype in (tf.variant, tf.resource) or layout.kind not in ("whole", "rows", "partial"):
        return
    if tf.is_symbolic_tensor(value) and not value.shape.is_fully_defined():
        value.set_shape(_invariant(tensor, layout))


def _in_optional(tensor: tf.Tensor) -> tf.Tensor | None:
    """The value from which an optional one has been made."""
    if tensor.op.type == "OptionalFromValue" and len(tensor.op.inputs) == 1:
        return tensor.op.inputs[0]
    return None


def _list_of(stacked: tf.Tensor) -> tf.Tensor:
    """A list of the slices of a tensor along its first axis."""
    return tf.raw_ops.TensorListFromTensor(tensor=stacked, element_shape=-1)


def _with_shapes(call: _Emitted, results: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    for tensor, value, layout in zip(call.op.outputs, results, call.decision.outputs, strict=True):
        if layout.kind != "rows":
            value.set_shape(tensor.shape)
    return list(results)


class Partition:
    """Adds a graph, partitioned, to the default one.

    Operations are added as early as they can be. Only when all that are left wait for values of
    other workers are these communicated, all at once.

    Args:
        analysis: the graph and its layouts.
        lane: the worker.
        known: the values for the whole batch of some tensors, by their `ref()`s.
    """

    def __init__(
        self, analysis: Analysis, lane: Lane, known: Mapping[Any, tf.Tensor] | None = None
    ) -> None:
        self._analysis, self._lane = analysis, lane
        self._values: dict[int, tf.Tensor] = {}
        self._converted: dict[tuple[int, Layout], tf.Tensor] = {}
        for tensor, whole in (known or {}).items():
            self._converted[id(tensor.deref()), WHOLE] = whole
        self._made: dict[Any, list[Any]] = {}
        self._communicated: list[tf.Tensor] = []
        self._stacks: dict[int, tf.Tensor] = {}  # the elements of lists, whole
        outputs = {t.op for t in analysis.results}
        self._results = {op for op in outputs if op.type == "Identity"}

    def add(
        self, inputs: Sequence[tf.Tensor], layouts: Sequence[Layout] | None = None
    ) -> list[tf.Tensor]:
        """Adds the graph.

        Args:
            inputs: the values of the graph's inputs, as this worker holds them.
            layouts: the layouts of the results; by default those that they have.

        Returns:
            The results of the analysis.
        """
        self._lane.partitions.append(self)
        try:
            return self._add_all(inputs, layouts)
        finally:
            self._lane.partitions.pop()

    def communicates(self, value: tf.Tensor) -> None:
        """Tells that a value has been communicated, for which an update waits."""
        self._communicated.append(value)

    def effects(self) -> list[tf.Operation]:
        """The operations without results that the graph's callers wait for."""
        graph = self._analysis.graph
        return [op for control in graph.control_outputs for op in self._made.get(control, ())]

    def made(self, op: Any) -> list[Any]:
        """What has been added for an operation of the graph."""
        return list(self._made.get(op, ()))

    def _add_all(
        self, inputs: Sequence[tf.Tensor], layouts: Sequence[Layout] | None
    ) -> list[tf.Tensor]:
        graph = self._analysis.graph
        for tensor, value in zip(graph.inputs, inputs, strict=True):
            self._values[id(tensor)] = value
        wanted = layouts or [v.layout for v in self._analysis.outputs]
        pairs = list(zip(self._analysis.results, wanted, strict=True))
        self._run(pairs)
        missing = [t for t, layout in pairs if self._waits_for(t, layout)]
        self._communicate(missing)
        return [self._as(tensor, layout) for tensor, layout in pairs]

    def _run(self, results: Sequence[tuple[tf.Tensor, Layout]]) -> None:
        """Adds all operations, and makes available results whole before updates begin."""
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
                    self._add(op, self._communicated if op.type == _UPDATE else ())
                    for user in users[op]:
                        waiting[user] -= 1
                        if waiting[user] == 0:
                            heapq.heappush(ready, numbers[user])
                continue
            missing = [t for op in parked for t in self._missing(op)]
            missing += [
                tensor
                for tensor, layout in results
                if id(tensor) in self._values and self._waits_for(tensor, layout)
            ]
            self._communicate(missing)
            # The program's own collectives come behind small ones, which are available earlier,
            # and an update when all else has been communicated.
            if parked:
                again, parked = parked, []
            elif collectives:
                again, collectives = collectives, []
            else:
                again, updates = updates, []
            released.update(again)
            ready = sorted(numbers[op] for op in again)

    def _controls(self, op: Any) -> Sequence[Any]:
        """The operations that an operation waits for besides its operands."""
        # TensorFlow has results wait for all effects; here, the new graph does that.
        return () if op in self._results else op.control_inputs

    def _missing(self, op: Any) -> list[tf.Tensor]:
        """The operands that have to be communicated and have not been."""
        wanted = self._analysis.decisions[op].inputs
        return [
            tensor
            for tensor, layout in zip(op.inputs, wanted, strict=True)
            if layout is not None and self._waits_for(tensor, layout)
        ]

    def _waits_for(self, tensor: tf.Tensor, layout: Layout) -> bool:
        own = self._analysis.value_of(tensor).layout
        if not needs_others(own, layout):
            return False
        if _in_optional(tensor) is not None:
            return self._waits_for(_in_optional(tensor), layout)
        if tensor.dtype in (tf.variant, tf.resource) and not self._is_stackable(tensor):
            return False  # Cannot be converted.
        return (id(tensor), WHOLE) not in self._converted

    def _add(self, op: Any, after: Sequence[Any] = ()) -> None:
        decision = self._analysis.decisions[op]
        inputs = [
            self._values[id(t)] if layout is None else self._as(t, layout)
            for t, layout in zip(op.inputs, decision.inputs, strict=True)
        ]
        for i, element in decision.local_shapes.items():
            inputs[i] = self._local_shape(op, i, element, inputs[i])
        before = [o for control in self._controls(op) for o in self._made.get(control, ())]
        before += after
        with contextlib.ExitStack() as scopes:
            if before:
                scopes.enter_context(tf.control_dependencies(before))
            if op.device:
                scopes.enter_context(tf.device(op.device))
            if op.type in _COLLECTIVES:
                self._lane.communication.begin()
            if decision.emit is None:
                results = self._lane.copy(op, inputs) if op.outputs else self._effect(op, inputs)
            else:
                values = [self._analysis.value_of(t) for t in op.inputs]
                self._lane.effects = []
                results = decision.emit(self._lane, _Emitted(op, values, decision), inputs)
                made = [r.op for r in results if tf.is_symbolic_tensor(r)]
                self._made[op] = [*made, *self._lane.effects]
        if decision.emit is None and op.outputs:
            self._made[op] = [results[0].op]
        for tensor, value in zip(op.outputs, results, strict=True):
            _refine(value, tensor, self._analysis.value_of(tensor).layout)
            self._values[id(tensor)] = value

    def _effect(self, op: Any, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        keep_functions_of(op)
        self._made[op] = [copy_operation(op, list(inputs))]
        return []

    # Layouts.

    def _as(self, tensor: tf.Tensor, layout: Layout) -> tf.Tensor:
        """A tensor of the graph in a layout; what has to be communicated has been."""
        own = self._analysis.value_of(tensor).layout
        value = self._values[id(tensor)]
        if own == layout or own.kind == "unset":
            return value
        key = (id(tensor), layout)
        if key not in self._converted:
            self._converted[key] = self._convert(tensor, own, value, layout)
        return self._converted[key]

    def _convert(
        self, tensor: tf.Tensor, own: Layout, value: tf.Tensor, layout: Layout
    ) -> tf.Tensor:
        if _in_optional(tensor) is not None:
            return tf.raw_ops.OptionalFromValue(components=[self._as(_in_optional(tensor), layout)])
        if "local" not in (own.kind, layout.kind) and self._is_stackable(tensor):
            return self._convert_list(tensor, own, value, layout)
        if tensor.dtype in (tf.variant, tf.resource) or "local" in (own.kind, layout.kind):
            if layout.kind == "local" or (own.kind == "local" and layout.is_sum):
                return value
            raise UnsupportedError(
                "A step combines values that differ between the workers. Received: the operation "
                f"{tensor.op.name!r} of type {tensor.op.type}, {own} where {layout} is needed. "
                "Compute it in a custom loop, by `strategy.run`."
            )
        if own.is_sum and layout.is_sum:
            return self._lane.settled(value)
        if own.kind != "whole":
            value = self._converted[id(tensor), WHOLE]
        if layout.kind == "whole":
            return value
        if layout.is_sum:
            return self._lane.contribution_of_whole(value)
        dims = self._analysis.value_of(tensor).dims
        assert dims is not None
        return self._own_rows_of(dims, value, layout)

    def _convert_list(
        self, tensor: tf.Tensor, own: Layout, value: tf.Tensor, layout: Layout
    ) -> tf.Tensor:
        """A list in another layout: its elements are stacked, converted and taken apart again."""
        if own.is_sum and layout.is_sum:
            return value
        whole = self._held(tensor)[0] if own.kind == "whole" else self._stacks[id(tensor)]
        if layout.is_sum:
            return _list_of(self._lane.contribution_of_whole(whole))
        if layout.kind == "rows":
            dims = self._analysis.value_of(tensor).content.dims
            moved = layout.moved_to(layout.axis + 1)
            return _list_of(self._own_rows_of((Dim(1, (Symbol(),)), *dims), whole, moved))
        return self._converted[id(tensor), WHOLE]

    def _is_stackable(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor is a list of tensors of one shape."""
        element = self._analysis.value_of(tensor).content
        if tensor.dtype != tf.variant or not isinstance(element, Value) or element.dims is None:
            return False
        differ = any(symbol.source is tensor for dim in element.dims for symbol in dim.symbols)
        return not differ and element_type(tensor) not in (None, tf.variant)

    def _held(self, tensor: tf.Tensor) -> tuple[tf.Tensor, Layout]:
        """What this worker holds of a tensor and how; the elements of a list are stacked."""
        value, layout = self._values[id(tensor)], self._analysis.value_of(tensor).layout
        if tensor.dtype != tf.variant:
            return value, layout
        dims = self._analysis.value_of(tensor).content.dims
        sizes = [self._own_size(axis, dim, layout) for axis, dim in enumerate(dims)]
        shape = tf.stack(sizes) if sizes else tf.zeros([0], tf.int32)
        stacked = tf.raw_ops.TensorListStack(
            input_handle=value, element_shape=shape, element_dtype=element_type(tensor)
        )
        stacked.set_shape([None] * (len(dims) + 1))
        return stacked, layout.moved_to(layout.axis + 1) if layout.kind == "rows" else layout

    def _own_size(self, axis: int, dim: Dim, layout: Layout) -> tf.Tensor:
        """The size of an axis of an element of a list, or -1 if it is unknown."""
        rest = layout.outer * layout.inner
        if layout.kind == "rows" and axis == layout.axis and rest.value is not None:
            return self._lane.own_rows(tf.int32, rest.value)
        unit = dim.divided_by(Dim(1, (self._analysis.batch,)))
        if unit is not None and unit.value is not None and dim.value is None:
            return self._lane.all_rows(tf.int32, unit.value)
        is_cut = layout.kind == "rows" and axis == layout.axis
        return tf.constant(-1 if is_cut or dim.value is None else dim.value)

    def _own_rows_of(self, dims: Sequence[Dim], value: tf.Tensor, layout: Layout) -> tf.Tensor:
        """This worker's rows of a value that it has as a whole."""
        if value.shape.rank is None:
            value.set_shape([None] * len(dims))
        before = (slice(None),) * layout.axis
        if layout.outer == ONE:
            first, own = self._range(layout.inner)
            if not dims[layout.axis].has(self._analysis.batch) and (
                dims[layout.axis].value is None
            ):
                # An axis of unknown size may be broadcast; another size cannot be cut.
                size = tf.shape(value)[layout.axis]
                one = tf.equal(size, 1)
                fits = one | tf.equal(
                    size, self._lane.all_rows(tf.int32) * self._size(layout.inner)
                )
                with tf.control_dependencies([tf.debugging.Assert(fits, [_CANNOT_CUT, size])]):
                    one = tf.identity(one)
                first, own = tf.where(one, 0, first), tf.where(one, 1, own)
            result = value[(*before, slice(first, first + own))]
        else:
            parts = self._apart(value, layout, self._lane.all_rows(tf.int32))
            axis = layout.axis + 1
            first = self._lane.first_row(tf.int32)
            own = self._lane.own_rows(tf.int32)
            cut = parts[((slice(None),) * axis) + (slice(first, first + own),)]
            result = self._together(cut, layout, value.shape)
        shape = value.shape.as_list()
        shape[layout.axis] = None
        result.set_shape(shape)
        return result

    def _range(self, inner: Dim) -> tuple[tf.Tensor, tf.Tensor]:
        lane = self._lane
        if inner.value is not None:
            return lane.first_row(tf.int32, inner.value), lane.own_rows(tf.int32, inner.value)
        size = self._size(inner)
        return lane.first_row(tf.int32) * size, lane.own_rows(tf.int32) * size

    def _size(self, dim: Dim) -> tf.Tensor:
        """A dimension other than the rows, when the graph runs."""
        if dim.value is not None:
            return tf.constant(dim.value)
        result = tf.constant(dim.factor)
        for symbol in dim.symbols:
            if symbol is self._analysis.batch:
                result *= self._lane.all_rows(tf.int32)
                continue
            result *= self._size_of(symbol)
        return result

    def _size_of(self, symbol: Symbol) -> tf.Tensor:
        for partition in reversed(self._lane.partitions):
            if id(symbol.source) in partition._values:
                break
        else:
            raise UnsupportedError(
                "A step computes with a size that is unknown where rows are put together. "
                "Compute it in a custom loop, by `strategy.run`."
            )
        size = tf.shape(partition._values[id(symbol.source)])[symbol.axis]
        layout = partition._analysis.value_of(symbol.source).layout
        if layout.kind == "rows" and layout.axis == symbol.axis:
            own = tf.maximum(self._lane.own_rows(tf.int32), 1)
            size = size // own * self._lane.all_rows(tf.int32)
        return size

    def _apart(self, value: tf.Tensor, layout: Layout, count: tf.Tensor) -> tf.Tensor:
        """Divides the rows' axis in three: repetitions, rows, and elements of a row."""
        shape = tf.shape(value)
        outer, inner = self._size(layout.outer), self._size(layout.inner)
        middle = tf.stack([outer, count, inner])
        sizes = tf.concat([shape[: layout.axis], middle, shape[layout.axis + 1 :]], axis=0)
        return tf.reshape(value, sizes)

    def _together(self, parts: tf.Tensor, layout: Layout, like: tf.TensorShape) -> tf.Tensor:
        shape = tf.shape(parts)
        axis = layout.axis
        size = tf.reduce_prod(shape[axis : axis + 3], keepdims=True)
        return tf.reshape(parts, tf.concat([shape[:axis], size, shape[axis + 3 :]], axis=0))

    def _local_shape(self, op: Any, i: int, element: int, given: tf.Tensor) -> tf.Tensor:
        """A shape for the whole batch as that of own rows."""
        lane, batch = self._lane, self._analysis.batch
        content = self._analysis.value_of(op.inputs[i]).content
        dims = [None] * given.shape[0] if content is None else list(content.ravel())
        others = [d.value if d is not None else None for d in dims]
        own: Any = None
        dim = dims[element]
        if dim is not None and dim.value is not None and dim.value < 0:
            return given
        if op.type == "Reshape" and all(
            n is not None and n >= 0 for k, n in enumerate(others) if k != element
        ):
            sizes = tuple(-1 if k == element else n for k, n in enumerate(others))
            key = ("constant", given.dtype, sizes)
            return lane.constant(key, lambda: tf.constant(sizes, given.dtype))
        if dim is not None:
            rest = dim.divided_by(Dim(1, (batch,)))
            if rest is not None and rest.value is not None:
                times = rest.value
                if all(n is not None for k, n in enumerate(others) if k != element):
                    return lane.own_shape(given.dtype, tuple(others), element, times)
                own = lane.own_rows(given.dtype, times)
        if own is None:
            own = given[element] // lane.all_rows(given.dtype) * lane.own_rows(given.dtype)
        parts = [
            own if k == element else given[k] if n is None else tf.constant(n, given.dtype)
            for k, n in enumerate(others)
        ]
        return tf.stack(parts)

    # Communication.

    def _communicate(self, tensors: Sequence[tf.Tensor]) -> None:
        """Makes tensors of the graph whole on all workers."""
        optional = [(t, _in_optional(t)) for t in tensors]
        held = [t if value is None else value for t, value in optional]
        unique = list({id(t): t for t in held}.values())
        unique = [t for t in unique if (id(t), WHOLE) not in self._converted]
        layouts = [self._analysis.value_of(t).layout for t in unique]
        parts = [t for t, v in zip(unique, layouts, strict=True) if v.kind == "partial"]
        of_rows = [t for t, v in zip(unique, layouts, strict=True) if v.kind == "rows"]
        if parts:
            given = [self._held(t) for t in parts]
            hows = [layout.how for _, layout in given]
            values = [self._contribution(*pair) for pair in given]
            totals = self._lane.communication.reduce(values, hows)
            for tensor, (value, _), total in zip(parts, given, totals, strict=True):
                total.set_shape(value.shape)
                self._keep(tensor, total)
        if of_rows:
            given = [self._held(t) for t in of_rows]
            moved = [self._rows_first(*pair) for pair in given]
            wholes = self._lane.communication.gather(moved)
            for tensor, pair, whole in zip(of_rows, given, wholes, strict=True):
                result = self._from_rows_first(*pair, whole)
                if tensor.dtype != tf.variant:
                    result.set_shape(tensor.shape)
                self._keep(tensor, result)

    def _keep(self, tensor: tf.Tensor, whole: tf.Tensor) -> None:
        self._communicated.append(whole)
        if tensor.dtype == tf.variant:
            self._stacks[id(tensor)] = whole
            whole = _list_of(whole)
        self._converted[id(tensor), WHOLE] = whole

    def _contribution(self, value: tf.Tensor, layout: Layout) -> tf.Tensor:
        return value if layout.settled else self._lane.settled(value, layout.how)

    def _rows_first(self, value: tf.Tensor, layout: Layout) -> tf.Tensor:
        """A tensor's rows as the first axis, those that count."""
        lane = self._lane
        axis = layout.axis
        if layout.outer != ONE:
            value = self._apart(value, layout, lane.own_rows(tf.int32))
            axis += 1
        if axis:
            order = [axis, *(a for a in range(value.shape.rank) if a != axis)]
            value = tf.transpose(value, order)
        counts = lane.share.counts
        if counts is not None:
            size = tf.shape(value)[0]
            value = value[: tf.where(counts, size, 0)]
        return value

    def _from_rows_first(self, value: tf.Tensor, layout: Layout, whole: tf.Tensor) -> tf.Tensor:
        axis = layout.axis
        rank = value.shape.rank
        if layout.outer != ONE:
            axis, rank = axis + 1, rank + 2
        if axis:
            order = [*range(1, axis + 1), 0, *range(axis + 1, rank)]
            whole = tf.transpose(tf.ensure_shape(whole, [None] * rank), order)
        if layout.outer != ONE:
            whole = self._together(whole, layout, value.shape)
        return whole
