"""The data types of rules: facts about tensors, and decisions on how to partition operations."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._src.global_view.contents import Axes
from tfdist._src.global_view.layout import WHOLE, Dim, Layout, Symbol, joined


@dataclasses.dataclass(frozen=True)
class Value:
    """Static facts about a tensor.

    Attributes:
        layout: how the workers hold the tensor. For a variable or a list of tensors, this is the
            layout of the variable's value or of the list's elements.
        dims: the dimensions of the tensor for the whole batch; None if the rank is unknown.
        content: the elements of the tensor, if they are known. For a small integer tensor, this is
            an array of `Dim`s, with None for each unknown element. For a tensor of axes along which
            a gradient is summed, it is an `Axes`. For a list of tensors, it is a `Value` with the
            facts that are true for all elements. For all other tensors, it is None.
    """

    layout: Layout
    dims: tuple[Dim, ...] | None = None
    content: Any = None


@dataclasses.dataclass
class Decision:
    """A choice of how to partition an operation.

    Attributes:
        inputs: the layout that the operation requires of each operand; None accepts the layout
            that the operand has.
        outputs: the layout of each result.
        dims: the dimensions of each result, if the rule knows more than the static shapes.
        local_shapes: maps the index of an operand to the index of one of the operand's elements.
            The operand is a shape for the whole batch (or the bounds of a slice), and this element
            depends on the number of rows. In the partitioned operation, the element is converted to
            the worker's number of rows.
        emit: a function that adds the operation to the partitioned graph; None if a copy of the
            operation is sufficient.
        parts: the analyses of the functions that the operation calls.
        values: all facts about the results; None to derive them from `outputs` and `dims`.
        reason: why operands are gathered, as shown by `explain`.
    """

    inputs: Sequence[Layout | None]
    outputs: Sequence[Layout]
    dims: Sequence[tuple[Dim, ...] | None] | None = None
    local_shapes: Mapping[int, int] = dataclasses.field(default_factory=dict)
    emit: Callable[..., Any] | None = None
    parts: Sequence[Any] = ()
    values: Sequence[Value] | None = None
    reason: str = ""


class Call:
    """An operation and the facts about its operands, as the argument of a rule.

    Attributes:
        op: the operation.
        values: facts about the operands.
        analysis: the analysis of the operation's graph.
        type: the type of the operation.
        layouts: the layouts of the operands.
        batch: the symbol for the number of rows of the batch.
    """

    def __init__(self, op: Any, values: Sequence[Value], analysis: Any) -> None:
        self.op, self.values, self.analysis = op, values, analysis
        self.type: str = op.type
        self.layouts = [value.layout for value in values]
        self.batch = analysis.batch

    def attr(self, name: str) -> Any:
        """Returns an attribute of the operation."""
        return self.op.get_attr(name)

    def dims(self, i: int) -> tuple[Dim, ...] | None:
        """Returns the dimensions of an operand."""
        return self.values[i].dims

    def rank(self, i: int) -> int | None:
        """Returns the rank of an operand."""
        dims = self.values[i].dims
        return None if dims is None else len(dims)

    def content(self, i: int) -> Any:
        """Returns the `content` of an operand, as defined by `Value`."""
        return self.values[i].content

    def ints(self, i: int) -> list[int] | None:
        """Returns the elements of an operand as integers; None if any element is unknown."""
        return as_ints(self.values[i].content)

    def out_rank(self, i: int = 0) -> int | None:
        """Returns the rank of a result."""
        rank: int | None = self.op.outputs[i].shape.rank
        return rank

    def has(self, kind: str) -> bool:
        """Whether any operand has a layout of the given kind."""
        return any(layout.kind == kind for layout in self.layouts)

    def whole(self, reason: str = "") -> Decision:
        """Returns the decision to make all operands whole and compute on the whole batch."""
        return Decision(
            [None if v.layout.kind in ("whole", "unset", "shared") else WHOLE for v in self.values],
            [WHOLE] * len(self.op.outputs),
            reason=reason,
        )

    def all(self, output: Layout, **more: Any) -> Decision:
        """Returns the decision to compute with the operands in their present layouts.

        Args:
            output: the layout of every result.
            **more: other attributes of the `Decision`.
        """
        return Decision([None] * len(self.values), [output] * len(self.op.outputs), **more)


def as_ints(content: Any) -> list[int] | None:
    """Converts the content of a tensor to integers; returns None if any element is unknown."""
    if not isinstance(content, np.ndarray):
        return None
    values = [None if d is None else d.value for d in content.ravel()]
    return None if None in values else values  # type: ignore[return-value]


def dims_of(tensor: Any, known: Any = None) -> tuple[Dim, ...] | None:
    """Returns a tensor's dimensions: its static shape, with a new symbol for each unknown size."""
    if tensor.dtype in (tf.resource, tf.variant) or tensor.shape.rank is None:
        return None
    return tuple(
        Dim(1, (Symbol(tensor, axis),)) if size is None else Dim(size)
        for axis, size in enumerate(tensor.shape)
    )


def merged(tensor: Any, known: Sequence[Dim | None]) -> tuple[Dim, ...]:
    """Fills in the dimensions that a rule does not know, with static sizes or new symbols."""
    shape = tensor.shape
    sizes = [None] * len(known) if shape.rank is None else list(shape)
    if len(sizes) != len(known):
        return dims_of(tensor) or ()
    return tuple(
        (Dim(1, (Symbol(tensor, axis),)) if size is None else Dim(size)) if dim is None else dim
        for axis, (dim, size) in enumerate(zip(known, sizes, strict=True))
    )


def joined_values(first: Value, second: Value, tensor: Any = None) -> Value:
    """Returns the facts about a tensor that gets one of two values, as after a conditional.

    Args:
        first: the facts about the first value.
        second: the facts about the second value.
        tensor: the tensor. If the sizes of the two values differ along an axis, the result has a
            new symbol for this axis of the tensor.
    """
    if first.layout.kind == "unset" and second.layout.kind != "unset":
        return second
    if second.layout.kind == "unset" and first.layout.kind != "unset":
        return first
    layout = joined(first.layout, second.layout)
    content = _joined_contents(first.content, second.content, tensor)
    if isinstance(content, Value):
        return Value(content.layout, None, content)
    if first.dims is None or second.dims is None or len(first.dims) != len(second.dims):
        is_cut = layout.kind == "rows" and first.layout != second.layout
        return Value(WHOLE if is_cut else layout, None, content)
    pairs = list(zip(first.dims, second.dims, strict=True))
    same = [a.is_same(b) for a, b in pairs]
    if layout.kind == "rows":
        if first.layout == second.layout:
            same[layout.axis] = True  # Equal layouts imply equal sizes.
        elif not same[layout.axis]:
            layout = WHOLE  # One of the axes has no rows, for example because its size is one.
    dims = tuple(
        a if equal else Dim(1, (Symbol(tensor, axis),))
        for axis, ((a, _), equal) in enumerate(zip(pairs, same, strict=True))
    )
    return Value(layout, dims, content)


def _joined_contents(first: Any, second: Any, tensor: Any) -> Any:
    if isinstance(first, Value) and isinstance(second, Value):
        return joined_values(first, second, tensor)
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        if first.shape != second.shape:
            return None
        result = np.empty(first.shape, dtype=object)
        for index in np.ndindex(first.shape):
            a: Any = first[index]
            b: Any = second[index]
            result[index] = a if a is not None and b is not None and a.is_same(b) else None
        return result
    return None


def is_same_value(first: Value, second: Value) -> bool:
    """Whether the facts about two tensors are equal."""
    return (
        first.layout == second.layout
        and _is_same(first.dims, second.dims)
        and _is_same(first.content, second.content)
    )


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, Value) and isinstance(second, Value):
        return is_same_value(first, second)
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return first.shape == second.shape and _is_same(tuple(first.flat), tuple(second.flat))
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(map(_is_same, first, second))
    if isinstance(first, Dim) and isinstance(second, Dim):
        return first.is_same(second)
    return first is second or (isinstance(first, Axes) and first == second)


def outside(values: Sequence[Value], graph: Any, tensors: Sequence[Any]) -> list[Value]:
    """Translates facts about a function's results into facts about the results of a call.

    The caller cannot refer to sizes of tensors inside the function. The symbols of these sizes are
    replaced by symbols for the axes of the call's results.

    Args:
        values: the facts about the results inside the function.
        graph: the function's graph.
        tensors: the results of the call, in the caller's graph.
    """
    names: dict[Symbol, Symbol] = {}
    for value, tensor in zip(values, tensors, strict=True):
        for axis, dim in enumerate(value.dims or ()):
            if dim.factor == 1 and len(dim.symbols) == 1 and is_size_in(dim.symbols[0], graph):
                names.setdefault(dim.symbols[0], Symbol(tensor, axis))

    def renamed(dim: Dim) -> Dim | None:
        if not any(is_size_in(symbol, graph) for symbol in dim.symbols):
            return dim
        if not all(s in names or not is_size_in(s, graph) for s in dim.symbols):
            return None
        symbols = [names.get(symbol, symbol) for symbol in dim.symbols]
        return Dim(dim.factor, tuple(sorted(symbols, key=id)))

    def leave(value: Value, tensor: Any) -> Value:
        dims, content, layout = value.dims, value.content, value.layout
        if dims is not None:
            new = [renamed(dim) for dim in dims]
            dims = tuple(
                Dim(1, (Symbol(tensor, axis),)) if dim is None else dim
                for axis, dim in enumerate(new)
            )
        if isinstance(content, Value):
            content = leave(content, tensor)
        elif isinstance(content, np.ndarray):
            content = content.copy()
            for index in np.ndindex(content.shape):
                size: Any = content[index]
                if size is not None:
                    content[index] = renamed(size)
        if layout.kind == "rows":
            outer, inner = renamed(layout.outer), renamed(layout.inner)
            if outer is None or inner is None:
                layout = WHOLE
            else:
                layout = dataclasses.replace(layout, outer=outer, inner=inner)
        return Value(layout, dims, content)

    return [leave(value, tensor) for value, tensor in zip(values, tensors, strict=True)]


def is_size_in(symbol: Symbol, graph: Any) -> bool:
    """Whether a symbol stands for a size of a tensor that belongs to the given graph."""
    return symbol.source is not None and getattr(symbol.source, "graph", None) is graph
