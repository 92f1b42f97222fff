"""Holds one worker's tensors of a partitioned graph, and converts them between layouts."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfdist._src.global_view.analysis import Analysis, needs_others
from tfdist._src.global_view.decision import Value
from tfdist._src.global_view.layout import ONE, WHOLE, Dim, Layout, Symbol
from tfdist._src.internals.tensorflow import element_type
from tfdist._src.xla import is_compiled_here, or_zeros
from tfdist.errors import UnsupportedError

_FEW_OF_A_ROW = 16
_CANNOT_CUT = "A batch of one row is broadcast to another size. Use batches of more rows. Size:"


class Communication(Protocol):
    """Combines values across workers. All workers make the same calls in the same order."""

    def reduce(self, tensors: Sequence[tf.Tensor], reductions: Sequence[str]) -> list[tf.Tensor]:
        """Reduces each tensor over the workers, by "sum", "min", "max", "product", and so on."""

    def gather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Concatenates the workers' tensors along the first axis, where their sizes may differ."""

    @property
    def scatters(self) -> bool:
        """Whether `scatter` can be called."""

    def scatter(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums tensors with all rows over the workers, and returns this worker's rows of the sums.

        The rows are on the first axis.
        """

    def awaits_rows(self, values: Sequence[tf.Tensor]) -> None:
        """Called after the first operation is added that needs the number of rows of all workers.

        Args:
            values: the operands of this operation.
        """

    def begin(self) -> None:
        """Called before one of the program's own collectives is added."""


@dataclasses.dataclass(frozen=True)
class RowShare:
    """One worker's rows of a batch.

    Attributes:
        rows: the number of rows that the worker computes with, an int32 scalar. It is at least 1,
            because a worker without rows computes with substitute rows.
        total: the number of rows of the batch, an int32 scalar.
        first: the index of the worker's first row in the batch, an int32 scalar. It is arbitrary
            if the worker has no rows.
        has_rows: a bool scalar that is False if the worker has no rows of its own, and computes
            with substitute rows; None if the worker is known to have rows.
        has_first_row: whether the worker has the first row of the batch, a bool scalar.
        is_first: whether the worker is the first of all workers, a bool scalar.
    """

    rows: tf.Tensor
    total: tf.Tensor
    first: tf.Tensor
    has_rows: tf.Tensor | None
    has_first_row: tf.Tensor
    is_first: tf.Tensor


class WorkerRows:
    """A worker's rows of a batch, and values that are computed from the number of these rows.

    Args:
        share: the worker's rows.
        communication: the worker's communication with other workers.

    Attributes:
        share: the worker's rows.
        communication: the worker's communication with other workers.
        graphs: the graphs that are being added; each is nested in the previous one.
        communicated: the communicated values, in order. Each is a pair of a graph and either a
            tensor of the graph or one of the program's own collectives.
    """

    def __init__(self, share: RowShare, communication: Communication) -> None:
        self.share, self.communication = share, communication
        self.graphs: list[Resharding] = []
        self.communicated: list[tuple[Any, Any]] = []
        self._needs_rows = self._has_reported = False
        self._made: dict[Any, tf.Tensor] = {}

    def constant(self, key: Any, make: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Returns a value that is computed only once per graph, because it depends on no operand.

        Args:
            key: identifies the value.
            make: computes the value.
        """
        key = (id(tf.compat.v1.get_default_graph()), key)
        if key not in self._made:
            with tf.control_dependencies(None):
                self._made[key] = make()
        return self._made[key]

    def _of_all(self) -> RowShare:
        """Returns `share`, and records that the program needs the number of rows of all workers."""
        self._needs_rows = True
        return self.share

    def report_needed_rows(self, operands: Callable[[], Sequence[tf.Tensor]]) -> None:
        """Calls `awaits_rows` once, if the program needs the number of rows of all workers.

        Args:
            operands: returns the operands of the operation that was just added.
        """
        if self._needs_rows and not self._has_reported:
            self._has_reported = True
            self.communication.awaits_rows(list(filter(tf.is_symbolic_tensor, operands())))

    def own_rows(self, dtype: Any, times: int = 1) -> tf.Tensor:
        """Returns the number of rows that this worker computes with, multiplied by `times`."""
        return self.constant(
            ("own", dtype, times), lambda: tf.cast(self.share.rows, dtype) * tf.cast(times, dtype)
        )

    def all_rows(self, dtype: Any, times: int = 1) -> tf.Tensor:
        """Returns the number of rows of the batch, multiplied by `times`."""
        return self.constant(
            ("all", dtype, times),
            lambda: tf.cast(self._of_all().total, dtype) * tf.cast(times, dtype),
        )

    def first_row(self, dtype: Any, times: int = 1) -> tf.Tensor:
        """Returns the index of this worker's first row in the batch, multiplied by `times`."""
        return self.constant(
            ("first", dtype, times),
            lambda: tf.cast(self._of_all().first, dtype) * tf.cast(times, dtype),
        )

    def own_shape(
        self, dtype: Any, sizes: tuple[int | None, ...], axis: int, times: int
    ) -> tf.Tensor:
        """Returns a shape for this worker's rows.

        Args:
            dtype: the type of the shape.
            sizes: the sizes of all axes; the size of `axis` is ignored.
            axis: the axis with the rows. Its size is `times` times the number of rows.
            times: the number of elements for each row.
        """
        return self.constant(
            ("own shape", dtype, sizes[:axis], sizes[axis + 1 :], times),
            lambda: _shape_with(self.own_rows(dtype, times), sizes, axis),
        )

    def whole_shape(
        self, dtype: Any, sizes: tuple[int | None, ...], axis: int, times: int
    ) -> tf.Tensor:
        """Returns a shape for all rows of the batch; the arguments are as for `own_shape`."""
        return self.constant(
            ("whole shape", dtype, sizes[:axis], sizes[axis + 1 :], times),
            lambda: _shape_with(self.all_rows(dtype, times), sizes, axis),
        )

    def fraction(self, dtype: Any) -> tf.Tensor:
        """Returns the fraction of the batch's rows that this worker has; 0 if it has no rows."""

        def divide() -> tf.Tensor:
            own = tf.cast(self.share.rows, tf.float64)
            if self.share.has_rows is not None:
                own *= tf.cast(self.share.has_rows, tf.float64)
            return tf.cast(own / tf.cast(self._of_all().total, tf.float64), dtype)

        return self.constant(("fraction", dtype), divide)

    def is_first(self) -> tf.Tensor:
        """Whether this worker is the first of all workers."""
        return self.share.is_first

    def contribution_of_whole(self, value: tf.Tensor) -> tf.Tensor:
        """Returns this worker's term of a sum that is equal to `value`, which all workers hold.

        The worker with the first row of the batch contributes `value`, and all others zeros.
        """
        return self._chosen(self._of_all().has_first_row, value, "sum")

    def neutral_without_rows(self, value: tf.Tensor, reduction: str = "sum") -> tf.Tensor:
        """Returns `value`, or the neutral element of the reduction if this worker has no rows."""
        if self.share.has_rows is None:
            return value
        return self._chosen(self.share.has_rows, value, reduction)

    def _chosen(self, condition: tf.Tensor, value: tf.Tensor, reduction: str) -> tf.Tensor:
        """Returns `value` if the condition is true, else the neutral element of the reduction."""
        neutral = _NEUTRAL[reduction]
        count = value.shape.num_elements()
        if is_compiled_here() or (count is not None and count <= _FEW):
            dtype = value.dtype
            number = self.constant(
                ("neutral", reduction, dtype), lambda: neutral(tf.zeros([], dtype))
            )
            return tf.where(condition, value, number)
        # Unlike `tf.where`, a conditional does not copy a large value.
        chosen = tf.cond(condition, lambda: value, lambda: neutral(value))
        chosen.set_shape(value.shape)
        return chosen

    def zeros_without_rows(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the values, or zeros if this worker has no rows, with only one conditional."""
        has_rows = self.share.has_rows
        return list(values) if has_rows is None else or_zeros(has_rows, values)


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
    """Returns the smallest number of a type if `sign` is -1, or the largest if it is 1."""
    if dtype.is_floating:
        return tf.constant(sign * float("inf"), dtype)
    return tf.constant(dtype.min if sign < 0 else dtype.max, dtype)


def _shape_with(size: tf.Tensor, sizes: Sequence[int | None], axis: int) -> tf.Tensor:
    parts = [size if k == axis else tf.constant(n, size.dtype) for k, n in enumerate(sizes)]
    return tf.stack(parts)


def _front(axis: int, value: tf.Tensor) -> Any:
    """Returns the permutation that moves one of a tensor's axes to the front."""
    if value.shape.rank is None:
        return tf.concat([[axis], tf.range(axis), tf.range(axis + 1, tf.rank(value))], axis=0)
    return [axis, *(a for a in range(value.shape.rank) if a != axis)]


def _in_optional(tensor: tf.Tensor) -> tf.Tensor | None:
    """Returns the tensor that an optional contains; None if `tensor` is not an optional."""
    if tensor.op.type == "OptionalFromValue" and len(tensor.op.inputs) == 1:
        return tensor.op.inputs[0]
    return None


def _list_of(stacked: tf.Tensor) -> tf.Tensor:
    """Makes a list from the slices of a tensor along its first axis."""
    return tf.raw_ops.TensorListFromTensor(tensor=stacked, element_shape=-1)


class Resharding:
    """Holds one worker's tensors of a graph, and converts them to other layouts on demand.

    Args:
        analysis: the graph and its layouts.
        worker: the worker.
        known: maps the `ref()` of some tensors to their values for the whole batch.

    Attributes:
        values: maps the `id()` of each tensor of the graph to this worker's copy of the tensor.
        communicated: the values that have been communicated so far. Updates of variables wait for
            all of them.
    """

    def __init__(
        self, analysis: Analysis, worker: WorkerRows, known: Mapping[Any, tf.Tensor] | None = None
    ) -> None:
        self._analysis, self._worker = analysis, worker
        self.values: dict[int, tf.Tensor] = {}
        self.communicated: list[tf.Tensor] = []
        self._converted: dict[tuple[int, Layout], tf.Tensor] = {}
        for tensor, whole in (known or {}).items():
            self._converted[id(tensor.deref()), WHOLE] = whole
        # Maps the id of a list to the stack of its elements for the whole batch.
        self._stacks: dict[int, tf.Tensor] = {}
        # Maps the id of a partial sum to the layouts that operations require of the sum.
        self._wanted: dict[int, set[Layout]] = {}

    def waits_for(self, tensor: tf.Tensor, layout: Layout) -> bool:
        """Whether a tensor must be communicated before it can be converted to a layout."""
        own = self._analysis.value_of(tensor).layout
        if not needs_others(own, layout):
            return False
        if _in_optional(tensor) is not None:
            return self.waits_for(_in_optional(tensor), layout)
        if tensor.dtype in (tf.variant, tf.resource) and not self._is_stackable(tensor):
            return False  # Cannot be converted.
        keys = (id(tensor), WHOLE), (id(tensor), layout)
        return not any(key in self._converted for key in keys)

    def in_layout(self, tensor: tf.Tensor, layout: Layout) -> tf.Tensor:
        """Returns a tensor, converted to a layout.

        If the conversion needs communication, `communicate` must have been called before.
        """
        own = self._analysis.value_of(tensor).layout
        value = self.values[id(tensor)]
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
            return tf.raw_ops.OptionalFromValue(
                components=[self.in_layout(_in_optional(tensor), layout)]
            )
        if "per_worker" not in (own.kind, layout.kind) and self._is_stackable(tensor):
            return self._convert_list(tensor, own, value, layout)
        if tensor.dtype in (tf.variant, tf.resource) or "per_worker" in (own.kind, layout.kind):
            if layout.kind == "per_worker" or (own.kind == "per_worker" and layout.is_sum):
                return value
            raise UnsupportedError(
                "A step combines values that differ between the workers. Received: the operation "
                f"{tensor.op.name!r} of type {tensor.op.type}, {own} where {layout} is needed. "
                "Compute it in a custom loop, with `strategy.run`."
            )
        if own.is_sum and layout.is_sum:
            return self._worker.neutral_without_rows(value)
        if own.kind != "whole":
            value = self._converted[id(tensor), WHOLE]
        if layout.kind == "whole":
            return value
        if layout.is_sum:
            return self._worker.contribution_of_whole(value)
        dims = self._analysis.value_of(tensor).dims
        assert dims is not None
        return self._own_rows_of(dims, value, layout)

    def _convert_list(
        self, tensor: tf.Tensor, own: Layout, value: tf.Tensor, layout: Layout
    ) -> tf.Tensor:
        """Converts a list: stacks its elements, converts the stack, and unstacks it."""
        if own.is_sum and layout.is_sum:
            return value
        whole = self._held(tensor)[0] if own.kind == "whole" else self._stacks[id(tensor)]
        if layout.is_sum:
            return _list_of(self._worker.contribution_of_whole(whole))
        if layout.kind == "rows":
            dims = self._analysis.value_of(tensor).content.dims
            moved = layout.moved_to(layout.axis + 1)
            return _list_of(self._own_rows_of((Dim(1, (Symbol(),)), *dims), whole, moved))
        return self._converted[id(tensor), WHOLE]

    def _is_stackable(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor is a list of tensors that all have the same shape."""
        element = self._analysis.value_of(tensor).content
        if tensor.dtype != tf.variant or not isinstance(element, Value) or element.dims is None:
            return False
        differ = any(symbol.source is tensor for dim in element.dims for symbol in dim.symbols)
        return not differ and element_type(tensor) not in (None, tf.variant)

    def _held(self, tensor: tf.Tensor) -> tuple[tf.Tensor, Layout]:
        """Returns this worker's value of a tensor, and the value's layout; a list is stacked."""
        value, layout = self.values[id(tensor)], self._analysis.value_of(tensor).layout
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
        """Returns the size of this worker's list elements along an axis; -1 if it is unknown."""
        rest = layout.outer * layout.inner
        if layout.kind == "rows" and axis == layout.axis and rest.value is not None:
            return self._worker.own_rows(tf.int32, rest.value)
        unit = dim.divided_by(Dim(1, (self._analysis.batch,)))
        if unit is not None and unit.value is not None and dim.value is None:
            return self._worker.all_rows(tf.int32, unit.value)
        is_cut = layout.kind == "rows" and axis == layout.axis
        return tf.constant(-1 if is_cut or dim.value is None else dim.value)

    def _own_rows_of(self, dims: Sequence[Dim], value: tf.Tensor, layout: Layout) -> tf.Tensor:
        """Cuts this worker's rows from a value for the whole batch."""
        if value.shape.rank is None:
            value.set_shape([None] * len(dims))
        before = (slice(None),) * layout.axis
        if layout.outer == ONE:
            first, own = self._range(layout.inner)
            if not dims[layout.axis].has(self._analysis.batch) and (
                dims[layout.axis].value is None
            ):
                # An axis of unknown size must either have size one, so that it is broadcast, or
                # hold all rows.
                size = tf.shape(value)[layout.axis]
                one = tf.equal(size, 1)
                fits = one | tf.equal(
                    size, self._worker.all_rows(tf.int32) * self._size(layout.inner)
                )
                with tf.control_dependencies([tf.debugging.Assert(fits, [_CANNOT_CUT, size])]):
                    one = tf.identity(one)
                first, own = tf.where(one, 0, first), tf.where(one, 1, own)
            result = value[(*before, slice(first, first + own))]
        else:
            parts = self._apart(value, layout, self._worker.all_rows(tf.int32))
            axis = layout.axis + 1
            first = self._worker.first_row(tf.int32)
            own = self._worker.own_rows(tf.int32)
            cut = parts[((slice(None),) * axis) + (slice(first, first + own),)]
            result = self._together(cut, layout, value.shape)
        shape = value.shape.as_list()
        shape[layout.axis] = None
        result.set_shape(shape)
        return result

    def _range(self, inner: Dim) -> tuple[tf.Tensor, tf.Tensor]:
        worker = self._worker
        if inner.value is not None:
            return worker.first_row(tf.int32, inner.value), worker.own_rows(tf.int32, inner.value)
        size = self._size(inner)
        return worker.first_row(tf.int32) * size, worker.own_rows(tf.int32) * size

    def _size(self, dim: Dim) -> tf.Tensor:
        """Returns a dimension as a tensor, which is computed at run time if necessary."""
        if dim.value is not None:
            return tf.constant(dim.value)
        result = tf.constant(dim.factor)
        for symbol in dim.symbols:
            if symbol is self._analysis.batch:
                result *= self._worker.all_rows(tf.int32)
                continue
            result *= self._size_of(symbol)
        return result

    def _size_of(self, symbol: Symbol) -> tf.Tensor:
        for graph in reversed(self._worker.graphs):
            if id(symbol.source) in graph.values:
                break
        else:
            raise UnsupportedError(
                "A step computes with a size that is unknown when rows are gathered. "
                "Compute it in a custom loop, with `strategy.run`."
            )
        size = tf.shape(graph.values[id(symbol.source)])[symbol.axis]
        layout = graph._analysis.value_of(symbol.source).layout
        if layout.kind == "rows" and layout.axis == symbol.axis:
            own = tf.maximum(self._worker.own_rows(tf.int32), 1)
            size = size // own * self._worker.all_rows(tf.int32)
        return size

    def _apart(self, value: tf.Tensor, layout: Layout, count: tf.Tensor) -> tf.Tensor:
        """Reshapes the axis of the rows into three axes: repetitions, rows, elements of a row."""
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

    def local_shape(self, op: Any, i: int, element: int, given: tf.Tensor) -> tf.Tensor:
        """Converts a shape for the whole batch to a shape for this worker's rows.

        Args:
            op: the operation that takes the shape.
            i: the index of the operand that is the shape.
            element: the index of the size that depends on the number of rows.
            given: the shape for the whole batch.
        """
        worker, batch = self._worker, self._analysis.batch
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
            return worker.constant(key, lambda: tf.constant(sizes, given.dtype))
        if dim is not None:
            rest = dim.divided_by(Dim(1, (batch,)))
            if rest is not None and rest.value is not None:
                times = rest.value
                if all(n is not None for k, n in enumerate(others) if k != element):
                    return worker.own_shape(given.dtype, tuple(others), element, times)
                own = worker.own_rows(given.dtype, times)
        if own is None:
            own = given[element] // worker.all_rows(given.dtype) * worker.own_rows(given.dtype)
        parts = [
            own if k == element else given[k] if n is None else tf.constant(n, given.dtype)
            for k, n in enumerate(others)
        ]
        return tf.stack(parts)

    def note_wanted(self, results: Sequence[tuple[tf.Tensor, Layout]]) -> None:
        """Records the layouts that operations and results require of each partial sum."""
        if not self._worker.communication.scatters:
            return
        analysis = self._analysis
        uses = [
            pair
            for op in analysis.operations
            for pair in zip(op.inputs, analysis.decisions[op].inputs, strict=True)
        ]
        for tensor, layout in (*uses, *results):
            own = analysis.value_of(tensor).layout
            if layout is not None and own.is_sum and needs_others(own, layout):
                self._wanted.setdefault(id(tensor), set()).add(layout)

    def _scattered(self, tensor: tf.Tensor) -> Layout | None:
        """Returns the layout of a partial sum after a reduce-scatter; None to all-reduce it."""
        wanted, dims = self._wanted.get(id(tensor), ()), self._analysis.value_of(tensor).dims
        if len(wanted) != 1 or dims is None or tensor.dtype in (tf.variant, tf.resource):
            return None
        (layout,) = wanted
        if layout.kind != "rows" or layout.outer != ONE or layout.inner != ONE:
            return None
        if dims[layout.axis] != Dim(1, (self._analysis.batch,)):
            return None
        others = [dim.value for axis, dim in enumerate(dims) if axis != layout.axis]
        known = [size for size in others if size is not None]
        # For smaller rows, a separate reduce-scatter takes longer than an all-reduce together with
        # other values.
        is_large = len(known) < len(others) or math.prod(known) >= _FEW_OF_A_ROW
        return layout if is_large else None

    def _scatter(self, pairs: Sequence[tuple[tf.Tensor, Layout]]) -> None:
        """Sums tensors over the workers, and keeps only this worker's rows (reduce-scatter)."""
        if not pairs:
            return
        moved = []
        for tensor, layout in pairs:
            value = self._contribution(*self._held(tensor))
            moved.append(tf.transpose(value, _front(layout.axis, value)) if layout.axis else value)
        sums = self._worker.communication.scatter(moved)
        for (tensor, layout), own in zip(pairs, sums, strict=True):
            if layout.axis:
                own = tf.transpose(own, tf.math.invert_permutation(_front(layout.axis, own)))
            self.communicated.append(own)
            self._converted[id(tensor), layout] = own

    def communicate(self, tensors: Sequence[tf.Tensor]) -> None:
        """Makes tensors whole on all workers; a sum may be scattered to the workers' rows instead.

        A sum is scattered if the operations that use it need only this worker's rows of it.
        """
        optional = [(t, _in_optional(t)) for t in tensors]
        held = [t if value is None else value for t, value in optional]
        unique = list({id(t): t for t in held}.values())
        unique = [t for t in unique if (id(t), WHOLE) not in self._converted]
        inside = {id(value) for _, value in optional if value is not None}
        pairs = [(t, None if id(t) in inside else self._scattered(t)) for t in unique]
        self._worker.communicated += [(self._analysis.graph, tensor) for tensor in unique]
        self._scatter([(tensor, layout) for tensor, layout in pairs if layout is not None])
        unique = [tensor for tensor, layout in pairs if layout is None]
        layouts = [self._analysis.value_of(t).layout for t in unique]
        parts = [t for t, v in zip(unique, layouts, strict=True) if v.kind == "partial"]
        of_rows = [t for t, v in zip(unique, layouts, strict=True) if v.kind == "rows"]
        if parts:
            given = [self._held(t) for t in parts]
            reductions = [layout.reduction for _, layout in given]
            values = [self._contribution(*pair) for pair in given]
            totals = self._worker.communication.reduce(values, reductions)
            for tensor, (value, _), total in zip(parts, given, totals, strict=True):
                total.set_shape(value.shape)
                self._keep(tensor, total)
        if of_rows:
            given = [self._held(t) for t in of_rows]
            moved = [self._rows_first(*pair) for pair in given]
            wholes = self._worker.communication.gather(moved)
            for tensor, pair, whole in zip(of_rows, given, wholes, strict=True):
                result = self._from_rows_first(*pair, whole)
                # A copy of the graph, as for XLA, would lose the shape from `set_shape`.
                if tensor.dtype != tf.variant:
                    result = tf.ensure_shape(result, tensor.shape)
                self._keep(tensor, result)

    def _keep(self, tensor: tf.Tensor, whole: tf.Tensor) -> None:
        self.communicated.append(whole)
        if tensor.dtype == tf.variant:
            self._stacks[id(tensor)] = whole
            whole = _list_of(whole)
        self._converted[id(tensor), WHOLE] = whole

    def _contribution(self, value: tf.Tensor, layout: Layout) -> tf.Tensor:
        return (
            value if layout.zeroed else self._worker.neutral_without_rows(value, layout.reduction)
        )

    def _rows_first(self, value: tf.Tensor, layout: Layout) -> tf.Tensor:
        """Moves the rows of a tensor to the first axis, and removes substitute rows."""
        worker = self._worker
        axis = layout.axis
        if layout.outer != ONE:
            value = self._apart(value, layout, worker.own_rows(tf.int32))
            axis += 1
        if axis:
            value = tf.transpose(value, _front(axis, value))
        has_rows = worker.share.has_rows
        if has_rows is not None:
            size = tf.shape(value)[0]
            value = value[: tf.where(has_rows, size, 0)]
        return value

    def _from_rows_first(self, value: tf.Tensor, layout: Layout, whole: tf.Tensor) -> tf.Tensor:
        axis = layout.axis
        rank = value.shape.rank
        if layout.outer != ONE:
            axis += 1
            rank = None if rank is None else rank + 2
        if axis:
            if rank is not None:
                whole = tf.ensure_shape(whole, [None] * rank)
            whole = tf.transpose(whole, tf.math.invert_permutation(_front(axis, whole)))
        if layout.outer != ONE:
            whole = self._together(whole, layout, value.shape)
        return whole
