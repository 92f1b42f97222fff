"""Rules for operations that move elements: reshapes, slices, concatenations and similar."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist._src.global_view.contents import Axes
from tfdist._src.global_view.decision import Call, Decision, dims_of, merged
from tfdist._src.global_view.layout import (
    ONE,
    WHOLE,
    ZEROED_SUM,
    Dim,
    Layout,
    Symbol,
    aligned,
    product,
    rows,
)
from tfdist._src.global_view.rules.table import is_whole, rule, same_rows, sums

# Shapes.


@rule("Shape", "ShapeN", "Size", "Rank", per_worker=True)
def shape_of(call: Call) -> Decision | None:
    """Returns the shape for the whole batch."""
    if call.has("per_worker") and not all(t.shape.is_fully_defined() for t in call.op.inputs):
        return None
    if not call.has("rows") or call.type == "Rank":
        return call.all(WHOLE)
    return call.all(WHOLE, emit=whole_shapes)


def whole_shapes(emitter: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Returns the shapes for the whole batch, given tensors that hold this worker's rows."""
    if call.op.type == "Size":
        (own,) = emitter.copy(call.op, inputs)
        return [own // emitter.own_rows(own.dtype) * emitter.all_rows(own.dtype)]
    return [
        _whole_shape(emitter, tensor, layout, result.dtype)
        for tensor, layout, result in zip(inputs, call.layouts, call.op.outputs, strict=True)
    ]


def _whole_shape(emitter: Any, tensor: Any, layout: Layout, dtype: Any) -> Any:
    if layout.kind != "rows":
        return tf.shape(tensor, dtype)
    axis, sizes = layout.axis, tensor.shape
    times = (layout.outer * layout.inner).value
    if sizes.rank is not None:
        others = tuple(size for k, size in enumerate(sizes) if k != axis)
        if times is not None and None not in others:
            return emitter.whole_shape(dtype, tuple(sizes), axis, times)
    own = tf.shape(tensor, dtype)
    size = emitter.all_rows(dtype)
    if not layout.has_one_element_per_row:
        size = own[axis] // emitter.own_rows(dtype) * size
    if sizes.rank is None:
        return tf.tensor_scatter_nd_update(own, [[axis]], [size])
    parts = [size if k == axis else own[k] if n is None else n for k, n in enumerate(sizes)]
    return tf.stack([tf.cast(part, dtype) for part in parts])


@rule("Reshape")
def reshape(call: Call) -> Decision | None:
    """Reshapes a tensor."""
    layout, dims, shape = call.layouts[0], call.dims(0), call.content(1)
    if call.has("per_worker") or not is_whole(call.layouts[1]):
        return None
    after = _reshaped(call)
    more: dict[str, Any] = {} if after is None else {"dims": [after]}
    if layout.kind != "rows":
        return call.all(WHOLE if layout.kind == "unset" else layout, **more)
    if dims is None or after is None or shape is None:
        return None
    new = aligned(dims, layout, after)
    if new is None:
        return None
    return call.all(new, local_shapes={1: new.axis}, **more)


def _reshaped(call: Call) -> tuple[Dim, ...] | None:
    """Returns the dimensions after a reshape; None if nothing is known of them."""
    output = call.op.outputs[0]
    shape, before = call.content(1), call.dims(0)
    if shape is None or isinstance(shape, Axes):
        return None
    after: list[Dim | None] = list(shape.ravel())
    if any(d == Dim(-1) for d in after):
        unknown = next(i for i, d in enumerate(after) if d == Dim(-1))
        rest = [d for i, d in enumerate(after) if i != unknown]
        if before is not None and None not in rest:
            after[unknown] = product(before).divided_by(product(rest))  # type: ignore[arg-type]
        else:
            after[unknown] = None
    elif sum(d is None for d in after) == 1 and before is not None:
        unknown = after.index(None)
        rest = [d for i, d in enumerate(after) if i != unknown]
        after[unknown] = product(before).divided_by(product(rest))  # type: ignore[arg-type]
    return merged(output, after)


@rule("ExpandDims")
def expand_dims(call: Call) -> Decision | None:
    """Inserts an axis."""
    axis, dims, layout = call.ints(1), call.dims(0), call.layouts[0]
    if axis is None or dims is None or call.has("per_worker"):
        return None
    at = axis[0] % (len(dims) + 1)
    new = (*dims[:at], ONE, *dims[at:])
    if layout.kind == "rows":
        layout = layout.moved_to(layout.axis + (at <= layout.axis))
    return call.all(layout, dims=[new])


@rule("Squeeze")
def squeeze(call: Call) -> Decision | None:
    """Removes axes of size one."""
    dims, layout = call.dims(0), call.layouts[0]
    if dims is None or call.has("per_worker"):
        return None
    axes = [a % len(dims) for a in call.attr("squeeze_dims")]
    if not axes:
        axes = [i for i, d in enumerate(dims) if d == ONE]
        if call.out_rank() != len(dims) - len(axes):
            return None
    new = tuple(d for i, d in enumerate(dims) if i not in axes)
    if layout.kind == "rows":
        if layout.axis in axes:
            return None
        layout = layout.moved_to(layout.axis - sum(a < layout.axis for a in axes))
    emit = squeeze_axes if not call.attr("squeeze_dims") and layout.kind == "rows" else None
    return call.all(layout, dims=[new], emit=emit)


def squeeze_axes(emitter: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Squeezes the axes of size one, but not the axis of the rows if this worker has one row."""
    axes = [i for i, d in enumerate(call.values[0].dims) if d == ONE]
    return [tf.squeeze(inputs[0], axes)]


@rule("Transpose", "ConjugateTranspose")
def transpose(call: Call) -> Decision | None:
    """Permutes axes."""
    dims, layout, order = call.dims(0), call.layouts[0], call.ints(1)
    if dims is None or call.has("per_worker"):
        return None
    if order is None:
        return None if layout.kind == "rows" else call.all(layout)
    new = tuple(dims[a] for a in order)
    if layout.kind == "rows":
        layout = layout.moved_to(order.index(layout.axis))
    return call.all(layout, dims=[new])


@rule("BroadcastTo")
def broadcast_to(call: Call) -> Decision | None:
    """Repeats a tensor along axes of size one and new axes."""
    return _spread(call, shape_at=1, given=0)


@rule("Fill")
def fill(call: Call) -> Decision | None:
    """Fills a tensor with one number."""
    return _spread(call, shape_at=0, given=1)


@rule("Empty")
def empty(call: Call) -> Decision | None:
    """Makes an uninitialized tensor."""
    shape = call.content(0)
    if shape is None or not is_whole(call.layouts[0]):
        return None
    new = merged(call.op.outputs[0], list(shape.ravel()))
    axis = _axis_with_rows(call, new)
    if axis is None:
        return call.all(WHOLE, dims=[new])
    inner = new[axis].divided_by(Dim(1, (call.batch,)))
    assert inner is not None
    return call.all(rows(axis, inner=inner), dims=[new], local_shapes={0: axis})


def _spread(call: Call, shape_at: int, given: int) -> Decision | None:
    """Returns the decision for an operation that repeats a value to fill a shape.

    Args:
        call: the call.
        shape_at: the index of the operand that is the shape.
        given: the index of the operand that is the value.
    """
    shape, layout, dims = call.content(shape_at), call.layouts[given], call.dims(given)
    if (
        call.has("per_worker")
        or not is_whole(call.layouts[shape_at])
        or shape is None
        or dims is None
    ):
        return None if call.has("rows") or call.has("per_worker") else call.all(layout)
    new = merged(call.op.outputs[0], list(shape.ravel()))
    rank = len(new)
    if layout.kind == "rows":
        axis = layout.axis - len(dims) + rank
        if not new[axis].is_same(dims[layout.axis]) and (
            new[axis].value is not None or new[axis].has(call.batch)
        ):
            return None
        changed = list(new)
        changed[axis] = dims[layout.axis]
        return call.all(layout.moved_to(axis), dims=[tuple(changed)], local_shapes={shape_at: axis})
    axis_of_rows = _axis_with_rows(call, new)
    inputs: list[Layout | None] = [None, None]
    if layout.kind == "partial" and _repeats_for_rows(call, dims, new):
        inputs[given], layout = WHOLE, WHOLE
    if axis_of_rows is not None and layout.kind == "whole":
        at = axis_of_rows - rank
        missing = -at > len(dims) or dims[at] == ONE
        if missing:
            inner = new[axis_of_rows].divided_by(Dim(1, (call.batch,)))
            assert inner is not None
            result = rows(axis_of_rows, inner=inner)
            return Decision(inputs, [result], dims=[new], local_shapes={shape_at: axis_of_rows})
    return Decision(inputs, [WHOLE if layout.kind == "unset" else layout], dims=[new])


def _repeats_for_rows(call: Call, before: Sequence[Dim], after: Sequence[Dim]) -> bool:
    """Whether an operation repeats a value for each row.

    If so, a partial sum is communicated before it is repeated, while it is still small.
    """
    old = [ONE] * (len(after) - len(before)) + list(before)
    grown = [new for was, new in zip(old, after, strict=True) if was == ONE and new != ONE]
    return any(dim.is_same(Dim(1, (call.batch,))) for dim in grown)


def _axis_with_rows(call: Call, dims: Sequence[Dim]) -> int | None:
    """Returns the first axis with a size that is a multiple of the number of rows; else None."""
    unit = Dim(1, (call.batch,))
    for axis, dim in enumerate(dims):
        if dim.has(call.batch) and dim.divided_by(unit) is not None:
            return axis
    return None


@rule("Tile")
def tile(call: Call) -> Decision | None:
    """Repeats a tensor along its axes."""
    layout, dims, times = call.layouts[0], call.dims(0), call.content(1)
    if call.has("per_worker") or not is_whole(call.layouts[1]) or dims is None:
        return None
    if times is None or isinstance(times, Axes):
        return None if layout.kind == "rows" else call.all(layout)
    factors = list(times.ravel())
    new = merged(
        call.op.outputs[0],
        [None if f is None else d * f for d, f in zip(dims, factors, strict=True)],
    )
    if layout.kind == "rows":
        factor = factors[layout.axis]
        if factor is None or factor.has(call.batch):
            return None
        return call.all(rows(layout.axis, layout.outer * factor, layout.inner), dims=[new])
    inputs: list[Layout | None] = [None, None]
    if layout.kind == "partial" and _repeats_for_rows(call, dims, new):
        inputs[0], layout = WHOLE, WHOLE
    for axis, factor in enumerate(factors):
        if layout.kind == "whole" and factor is not None and factor.has(call.batch):
            if dims[axis] != ONE:
                continue
            inner = factor.divided_by(Dim(1, (call.batch,)))
            if inner is None:
                continue
            return Decision(inputs, [rows(axis, inner=inner)], dims=[new], local_shapes={1: axis})
    return Decision(inputs, [layout], dims=[new])


@rule("Pack")
def pack(call: Call) -> Decision | None:
    """Stacks tensors along a new axis."""
    target = same_rows(call, range(len(call.values)))
    if call.has("per_worker"):
        return None
    rank = call.rank(0)
    if rank is None:
        return None
    axis = int(call.attr("axis")) % (rank + 1)
    dims = call.dims(0) or ()
    new = (*dims[:axis], Dim(len(call.values)), *dims[axis:])
    if target is None:
        return _linear_parts(call, new)
    layout = target.moved_to(target.axis + (axis <= target.axis))
    inputs = [None if v == target else target for v in call.layouts]
    return Decision(inputs, [layout], dims=[new])


def _linear_parts(call: Call, dims: Any = None, last: int | None = None) -> Decision | None:
    """Returns the decision for a stack or concatenation of tensors without rows.

    Args:
        call: the call.
        dims: the dimensions of the result; None if they are unknown.
        last: the number of operands that are combined; by default, all of them.
    """
    parts = call.layouts if last is None else call.layouts[:last]
    if any(v.kind == "rows" for v in parts):
        return None
    if all(is_whole(v) for v in parts):
        return call.all(WHOLE, dims=None if dims is None else [dims])
    if not all(v.is_sum for v in parts if v.kind == "partial"):
        return None
    inputs, result = sums(parts)
    inputs += [None] * (len(call.layouts) - len(parts))
    return Decision(inputs, [result], dims=None if dims is None else [dims])


@rule("Unpack")
def unpack(call: Call) -> Decision | None:
    """Unstacks a tensor along an axis."""
    dims, layout = call.dims(0), call.layouts[0]
    if dims is None or call.has("per_worker"):
        return None
    axis = int(call.attr("axis")) % len(dims)
    new = tuple(d for i, d in enumerate(dims) if i != axis)
    if layout.kind == "rows":
        if layout.axis == axis:
            return None
        layout = layout.moved_to(layout.axis - (axis < layout.axis))
    return call.all(layout, dims=[new] * len(call.op.outputs))


@rule("ConcatV2")
def concat(call: Call) -> Decision | None:
    """Concatenates tensors along an axis."""
    axis, rank = call.ints(len(call.values) - 1), call.rank(0)
    parts = range(len(call.values) - 1)
    if axis is None or rank is None or call.has("per_worker"):
        return None
    at = axis[0] % rank
    sizes = [call.dims(i) for i in parts]
    new: list[Any] | None = None
    if all(s is not None and len(s) == rank for s in sizes):
        first = sizes[0]
        assert first is not None
        new = list(first)
        new[at] = _total([s[at] for s in sizes])  # type: ignore[index]
    dims = None if new is None else merged(call.op.outputs[0], new)
    target = same_rows(call, parts)
    if target is None:
        return _linear_parts(call, dims, last=len(parts))
    more: dict[str, Any] = {} if dims is None else {"dims": [dims]}
    if target.axis != at:
        inputs = [None if v == target else target for v in call.layouts[:-1]]
        if dims is not None:
            first = next(s for s, v in zip(sizes, call.layouts[:-1], strict=True) if v == target)
            changed = list(dims)
            changed[target.axis] = first[target.axis]  # type: ignore[index]
            more["dims"] = [tuple(changed)]
        return Decision([*inputs, None], [target], **more)
    # The parts have the same rows, and are concatenated along the axis of the rows.
    held = call.layouts[:-1]
    if any(v.kind != "rows" or v.axis != at or v.inner != target.inner for v in held):
        return None
    outer = _total([v.outer for v in held])
    if outer is None or dims is None:
        return None
    return call.all(rows(at, outer, target.inner), dims=[dims])


def _total(sizes: Sequence[Dim]) -> Dim | None:
    result = sizes[0]
    for size in sizes[1:]:
        if size.symbols == result.symbols:
            result = Dim(result.factor + size.factor, result.symbols)
        elif size.value is not None and result.value is not None:
            result = Dim(result.value + size.value)
        else:
            return None
    return result


@rule("Split", "SplitV")
def split(call: Call) -> Decision | None:
    """Splits a tensor along an axis."""
    data, axis_at = (1, 0) if call.type == "Split" else (0, 2)
    dims, layout, axis = call.dims(data), call.layouts[data], call.ints(axis_at)
    if dims is None or axis is None or call.has("per_worker"):
        return None
    at = axis[0] % len(dims)
    count = len(call.op.outputs)
    sizes = call.content(1) if call.type == "SplitV" else None
    new = []
    for i, output in enumerate(call.op.outputs):
        size = None
        if sizes is not None and sizes.size == count and sizes.ravel()[i] != Dim(-1):
            size = sizes.ravel()[i]
        elif call.type == "Split":
            size = dims[at].divided_by(Dim(count))
        new.append(merged(output, [size if a == at else d for a, d in enumerate(dims)]))
    if layout.kind != "rows" or layout.axis != at:
        return call.all(WHOLE if layout.kind == "unset" else layout, dims=new)
    # The tensor is split along the axis of the rows, so each piece must repeat all rows.
    unit = dims[at].divided_by(layout.outer)
    if unit is None:
        return None
    outers = [sizes[at].divided_by(unit) for sizes in new]
    if any(n is None or n.value is None for n in outers):
        return None
    layouts = [rows(at, n, layout.inner) for n in outers]  # type: ignore[arg-type]
    emit = split_in_sizes if call.type == "SplitV" else None
    return Decision([None] * len(call.values), layouts, dims=new, emit=emit)


def split_in_sizes(emitter: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Splits this worker's rows; converts the sizes, which are for the whole batch."""
    data, sizes, axis = inputs
    own = sizes // emitter.all_rows(sizes.dtype) * emitter.own_rows(sizes.dtype)
    return emitter.copy(call.op, [data, tf.where(sizes < 0, sizes, own), axis])


@rule("Slice")
def slice_(call: Call) -> Decision | None:
    """Takes a range of elements along each axis."""
    dims, layout = call.dims(0), call.layouts[0]
    begin, size = call.content(1), call.content(2)
    if call.has("per_worker") or not all(map(is_whole, call.layouts[1:])) or dims is None:
        return None
    new: list[Any] = list(call.op.outputs[0].shape) if call.out_rank() is not None else []
    if size is not None:
        new = [
            None
            if s is None
            else (
                d
                if s == Dim(-1) and begin is not None and begin.ravel()[i] == Dim(0)
                else None
                if s == Dim(-1)
                else s
            )
            for i, (s, d) in enumerate(zip(size.ravel(), dims, strict=True))
        ]
        known = [merged(call.op.outputs[0], new)]
    else:
        known = [dims_of(call.op.outputs[0])]  # type: ignore[list-item]
    if layout.kind != "rows":
        return call.all(WHOLE if layout.kind == "unset" else layout, dims=known)
    if begin is None or size is None:
        return None
    # The slice must contain all rows, once or several times.
    axis = layout.axis
    first, many = begin.ravel()[axis], size.ravel()[axis]
    unit = dims[axis].divided_by(layout.outer)
    if unit is None or first is None or many is None:
        return None
    start = Dim(0) if first == Dim(0) else first.divided_by(unit)
    if start is not None and many.is_same(dims[axis]):
        count: Dim | None = layout.outer
    elif many == Dim(-1):
        count = None if start is None else _difference(layout.outer, start)
    else:
        count = many.divided_by(unit)
    if start is None or count is None:
        return None
    if count != layout.outer and (start.value is None or not count.value):
        return None
    changed = list(known[0])
    changed[axis] = unit * count
    local = {2: axis} if start == Dim(0) else {1: axis, 2: axis}
    return call.all(rows(axis, count, layout.inner), dims=[tuple(changed)], local_shapes=local)


def _difference(first: Dim, second: Dim) -> Dim | None:
    if second == Dim(0):
        return first
    one, other = first.value, second.value
    return None if one is None or other is None else Dim(one - other)


class _Slicing:
    """The effect of a strided slice on each axis.

    Attributes:
        kept: for each axis of the input, the corresponding axis of the result; None if the slice
            removes the axis.
        full: the axes of the input that the slice takes completely and in order.
        new: the axes of the result that the slice inserts.
        entries: for each axis of the input, the index of its entry in `begin` and `end`; None if
            the axis has no entry.
        ranges: maps each axis that is sliced with stride 1 to the begin and the end. An unknown
            begin or end is None.
    """

    def __init__(self, op: Any, rank: int, begin: Any, end: Any, strides: Any, dims: Any) -> None:
        masks = {
            name: int(op.get_attr(f"{name}_mask"))
            for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
        }
        count = len(strides)
        taken = sum(
            not (masks["new_axis"] >> i & 1 or masks["ellipsis"] >> i & 1) for i in range(count)
        )
        self.kept: list[int | None] = []
        self.full: set[int] = set()
        self.new: list[int] = []
        self.entries: list[int | None] = []
        self.ranges: dict[int, tuple[Any, Any]] = {}
        out = 0

        def whole_axis() -> None:
            nonlocal out
            self.full.add(len(self.kept))
            self.kept.append(out)
            self.entries.append(None)
            out += 1

        for i in range(count):
            bit = 1 << i
            if masks["ellipsis"] & bit:
                for _ in range(rank - taken):
                    whole_axis()
            elif masks["new_axis"] & bit:
                self.new.append(out)
                out += 1
            elif masks["shrink_axis"] & bit:
                self.kept.append(None)
                self.entries.append(i)
            else:
                axis = len(self.kept)
                first = Dim(0) if masks["begin"] & bit else begin[i]
                last = dims[axis] if masks["end"] & bit else end[i]
                one = strides[i] is not None and strides[i].value == 1
                if one:
                    self.ranges[axis] = (first, last)
                    is_end = last is not None and last.is_same(dims[axis])
                    if first == Dim(0) and is_end:
                        self.full.add(axis)
                self.kept.append(out)
                self.entries.append(i)
                out += 1
        while len(self.kept) < rank:
            whole_axis()
        self.rank = out


def _slicing(call: Call, dims: Any, at: int) -> _Slicing | None:
    parts = [call.content(at + i) for i in range(3)]
    if parts[2] is None:
        return None
    count = parts[2].size
    lists = [
        list(p.ravel()) if p is not None and not isinstance(p, Axes) else [None] * count
        for p in parts
    ]
    begin, end, strides = lists
    return _Slicing(call.op, len(dims), begin, end, strides, dims)


@rule("StridedSlice")
def strided_slice(call: Call) -> Decision | None:
    """Slices with begin, end and stride, like Python."""
    dims, layout = call.dims(0), call.layouts[0]
    if call.has("per_worker") or not all(map(is_whole, call.layouts[1:])) or dims is None:
        return None
    if layout.kind in ("whole", "partial", "unset"):
        made = _slicing(call, dims, 1)
        known = None if made is None else _sliced_dims(call, made, dims)
        return call.all(WHOLE if layout.kind == "unset" else layout, dims=[known])
    slicing = _slicing(call, dims, 1)
    if slicing is None:
        return None
    known = _sliced_dims(call, slicing, dims)
    if layout.axis in slicing.full:
        new = slicing.kept[layout.axis]
        assert new is not None and known is not None
        entry = slicing.entries[layout.axis]
        changed = list(known)
        changed[new] = dims[layout.axis]
        local = {} if entry is None or call.attr("end_mask") >> entry & 1 else {2: entry}
        return call.all(layout.moved_to(new), dims=[tuple(changed)], local_shapes=local)
    repetitions = _slice_of_repetitions(call, slicing, dims, known)
    return repetitions or _first_element(call, slicing, known)


def _first_element(call: Call, slicing: _Slicing, known: Any) -> Decision | None:
    """Returns the decision to take the first element along the axis of the rows.

    This element belongs to the first row of the batch, which only one worker has.
    """
    layout, begin = call.layouts[0], call.content(1)
    entry = slicing.entries[layout.axis]
    dtype = call.op.inputs[0].dtype
    if entry is None or layout.outer != ONE or isinstance(begin, Axes) or begin is None:
        return None
    if not (dtype.is_floating or dtype.is_integer or dtype.is_complex):
        return None
    if slicing.kept[layout.axis] is None:
        is_first = begin.ravel()[entry] == Dim(0)
    else:
        is_first = slicing.ranges.get(layout.axis) == (Dim(0), ONE)
    if not is_first:
        return None
    return call.all(ZEROED_SUM, dims=[known], emit=of_the_first_row)


def of_the_first_row(emitter: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Returns this worker's term of a sum that is equal to a value of the batch's first row."""
    (value,) = emitter.copy(call.op, inputs)
    return [emitter.contribution_of_whole(value)]


def _slice_of_repetitions(call: Call, slicing: _Slicing, dims: Any, known: Any) -> Decision | None:
    """Returns the decision to take some of the repetitions of all rows along an axis.

    An example is one part of a concatenation of tensors that have the same rows.
    """
    layout = call.layouts[0]
    entry, new = slicing.entries[layout.axis], slicing.kept[layout.axis]
    if entry is None or new is None or layout.axis not in slicing.ranges or known is None:
        return None
    if _counts_from_the_end(call, entry):
        return None
    unit = dims[layout.axis].divided_by(layout.outer)
    first, last = slicing.ranges[layout.axis]
    if unit is None or first is None or last is None:
        return None
    start = Dim(0) if first == Dim(0) else first.divided_by(unit)
    stop = last.divided_by(unit)
    if start is None or stop is None or start.value is None or stop.value is None:
        return None
    if layout.outer.value is None:
        return None
    # A slice may end beyond the last element.
    count = min(stop.value, layout.outer.value) - start.value
    if count < 1 or start.value < 0:
        return None
    local = {}
    if not call.attr("begin_mask") >> entry & 1:
        local[1] = entry
    if not call.attr("end_mask") >> entry & 1:
        local[2] = entry
    changed = list(known)
    changed[new] = unit * Dim(count)
    result = rows(new, Dim(count), layout.inner)
    return call.all(result, dims=[tuple(changed)], local_shapes=local)


def _counts_from_the_end(call: Call, entry: int) -> bool:
    """Whether a bound of the slice may be negative.

    A negative bound would count from the end of this worker's rows, not from the end of the batch.
    """
    for operand, mask in ((1, "begin_mask"), (2, "end_mask")):
        content = call.content(operand)
        if call.attr(mask) >> entry & 1:
            continue
        if content is None or isinstance(content, Axes):
            return True
        size = content.ravel()[entry]
        if size is None or (size.value is not None and size.value < 0):
            return True
    return False


def _sliced_dims(call: Call, slicing: _Slicing, dims: Any) -> tuple[Dim, ...] | None:
    result: list[Any] = [None] * slicing.rank
    for axis in slicing.new:
        result[axis] = ONE
    for axis in slicing.full:
        kept = slicing.kept[axis]
        assert kept is not None
        result[kept] = dims[axis]
    if call.out_rank() not in (None, slicing.rank):
        return None
    return merged(call.op.outputs[0], result)


@rule("StridedSliceGrad")
def strided_slice_gradient(call: Call) -> Decision | None:
    """Makes a tensor of zeros, with the gradient at the positions of the slice."""
    shape, layout = call.content(0), call.layouts[4]
    if call.has("per_worker") or not all(map(is_whole, call.layouts[:4])):
        return None
    if layout.kind in ("whole", "partial"):
        return call.all(layout) if layout.kind == "whole" or layout.is_sum else None
    if shape is None or layout.kind != "rows":
        return None
    dims = [d if d is not None else Dim(1, (Symbol(),)) for d in shape.ravel()]
    slicing = _slicing(call, dims, 1)
    if slicing is None or layout.axis not in slicing.kept:
        return None
    axis = slicing.kept.index(layout.axis)
    result = merged(call.op.outputs[0], dims)
    if axis in slicing.full:
        entry = slicing.entries[axis]
        local = {0: axis}
        if entry is not None and not call.attr("end_mask") >> entry & 1:
            local[2] = entry
        return call.all(layout.moved_to(axis), dims=[result], local_shapes=local)
    return _gradient_of_repetitions(call, slicing, axis, dims, result)


def _gradient_of_repetitions(
    call: Call, slicing: _Slicing, axis: int, dims: Any, result: Any
) -> Decision | None:
    layout = call.layouts[4]
    gradient = call.dims(4)
    entry = slicing.entries[axis]
    if gradient is None or entry is None or axis not in slicing.ranges:
        return None
    if _counts_from_the_end(call, entry):
        return None
    unit = gradient[layout.axis].divided_by(layout.outer)
    outer = None if unit is None else dims[axis].divided_by(unit)
    if unit is None or outer is None:
        return None
    first = slicing.ranges[axis][0]
    if first is None or (first != Dim(0) and first.divided_by(unit) is None):
        return None
    local = {0: axis}
    if not call.attr("begin_mask") >> entry & 1:
        local[1] = entry
    if not call.attr("end_mask") >> entry & 1:
        local[2] = entry
    return call.all(rows(axis, outer, layout.inner), dims=[result], local_shapes=local)


@rule("Pad", "PadV2", "MirrorPad")
def pad(call: Call) -> Decision | None:
    """Adds elements at both ends of each axis."""
    dims, layout = call.dims(0), call.layouts[0]
    if call.has("per_worker") or not all(map(is_whole, call.layouts[1:])) or dims is None:
        return None
    if layout.kind == "partial":
        zero = call.type == "Pad"
        return call.all(layout) if layout.is_sum and zero else None
    if layout.kind != "rows":
        return call.all(WHOLE)
    known = [d if _is_unpadded(call, a) else None for a, d in enumerate(dims)]
    if known[layout.axis] is None:
        return _padded_repetitions(call, known)
    return call.all(layout, dims=[merged(call.op.outputs[0], known)])


def _padded_repetitions(call: Call, known: Sequence[Dim | None]) -> Decision | None:
    """Returns the decision to pad the axis of the rows by a multiple of the number of rows.

    The gradient of `_slice_of_repetitions` pads in this way.
    """
    layout, dims, around = call.layouts[0], call.dims(0), call.content(1)
    if call.type == "MirrorPad" or around is None or isinstance(around, Axes):
        return None
    assert dims is not None
    unit = dims[layout.axis].divided_by(layout.outer)
    outer: Dim | None = layout.outer
    for size in around.reshape(-1, 2)[layout.axis]:
        times = None if unit is None or size is None else size.divided_by(unit)
        outer = None if times is None or outer is None else _total([outer, times])
    if outer is None:
        return None
    return call.all(
        rows(layout.axis, outer, layout.inner),
        dims=[merged(call.op.outputs[0], known)],
        emit=pad_repetitions,
    )


def pad_repetitions(emitter: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Pads the axis of the rows; converts the padding, which is for the whole batch."""
    around, axis = inputs[1], call.layouts[0].axis
    own = around[axis] // emitter.all_rows(around.dtype) * emitter.own_rows(around.dtype)
    local = tf.concat([around[:axis], own[None], around[axis + 1 :]], axis=0)
    return emitter.copy(call.op, [inputs[0], local, *inputs[2:]])


def _is_unpadded(call: Call, axis: int) -> bool:
    around = call.content(1)
    if around is None or isinstance(around, Axes):
        return False
    return all(size == Dim(0) for size in around.reshape(-1, 2)[axis])


@rule("MirrorPadGrad")
def mirror_pad_gradient(call: Call) -> Decision | None:
    """Computes the gradient of a mirrored pad."""
    layout, dims = call.layouts[0], call.dims(0)
    if layout.kind != "rows" or dims is None or not _is_unpadded(call, layout.axis):
        return None
    known = [d if _is_unpadded(call, a) else None for a, d in enumerate(dims)]
    return call.all(layout, dims=[merged(call.op.outputs[0], known)])


@rule("ReverseV2", "Roll", "Cumsum", "Cumprod", "CumulativeLogsumexp")
def along_axes(call: Call) -> Decision | None:
    """Acts along some axes, separately for each slice along the other axes."""
    dims, layout = call.dims(0), call.layouts[0]
    axes = call.ints(len(call.values) - 1)
    if call.has("per_worker") or not all(map(is_whole, call.layouts[1:])) or dims is None:
        return None
    if layout.kind == "partial":
        linear = call.type in ("ReverseV2", "Roll", "Cumsum") and layout.is_sum
        return call.all(layout, dims=[dims]) if linear else None
    if layout.kind != "rows":
        return call.all(WHOLE, dims=[dims])
    if axes is None or layout.axis in [a % len(dims) for a in axes]:
        decision = call.whole("rows are coupled")
        decision.dims = [dims]
        return decision
    return call.all(layout, dims=[dims])


@rule("ReverseSequence")
def reverse_sequence(call: Call) -> Decision | None:
    """Reverses the first elements of each row."""
    layout, batch = call.layouts[0], int(call.attr("batch_dim"))
    if layout.kind != "rows" and call.layouts[1].kind != "rows":
        return None
    axis = layout if layout.kind == "rows" else call.layouts[1].moved_to(batch)
    if axis.axis != batch:
        return None
    return Decision([axis, axis.moved_to(0)], [axis], dims=[call.dims(0)])
