"""Rules for functions, conditionals, loops, lists of tensors and optionals."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist._src.global_view.contents import Axes, array
from tfdist._src.global_view.decision import (
    Call,
    Decision,
    Value,
    dims_of,
    is_same_value,
    is_size_in,
    joined_values,
    merged,
    outside,
)
from tfdist._src.global_view.layout import UNSET, WHOLE, ZEROED_SUM, Dim, Layout, Symbol
from tfdist._src.global_view.rules.table import RULES, is_whole, rule

# Functions.


@rule("PartitionedCall", "StatefulPartitionedCall", "RemoteCall", per_worker=True)
def function_call(call: Call) -> Decision | None:
    """Calls a function, which is inlined so that its operations can be partitioned."""
    name = call.attr("f").name if call.type in RULES else call.type
    part = call.analysis.part(call.op, name, call.values)
    values = outside(part.outputs, part.graph, call.op.outputs)
    return Decision(
        [None] * len(call.values),
        [v.layout for v in values],
        values=values,
        parts=[part],
        emit=inline,
    )


def inline(emitter: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Adds the partitioned operations of a function in place of a call of the function."""
    (part,) = call.decision.parts
    wanted = [
        inner.layout if inner.layout.kind == outer.kind else outer
        for inner, outer in zip(part.outputs, call.decision.outputs, strict=True)
    ]
    if call.op.node_def.attr["_XlaMustCompile"].b and not part.communicated(wanted):
        # The function stays compiled by XLA: TensorFlow may have no kernels for some operations,
        # such as grouped convolutions.
        def run(*given: tf.Tensor) -> list[tf.Tensor]:
            return list(emitter.inline(part, given, wanted))

        return list(tf.function(run, autograph=False, jit_compile=True)(*inputs))
    return emitter.inline(part, inputs, wanted)


@rule("If", "StatelessIf", "Case", "StatelessCase", per_worker=True)
def conditional(call: Call) -> Decision | None:
    """Calls one of several functions; the condition is equal on all workers."""
    if call.type.endswith("Case"):
        functions = [f.name for f in call.attr("branches")]
    else:
        functions = [call.attr("then_branch").name, call.attr("else_branch").name]
    parts = [call.analysis.part(call.op, name, call.values[1:]) for name in functions]
    results = [outside(part.outputs, part.graph, call.op.outputs) for part in parts]
    values = [
        _joined_branches([result[i] for result in results], tensor)
        for i, tensor in enumerate(call.op.outputs)
    ]
    first = call.layouts[0]
    inputs: list[Layout | None] = [None if is_whole(first) or first.kind == "per_worker" else WHOLE]
    inputs += [None] * (len(call.values) - 1)
    return Decision(inputs, [v.layout for v in values], values=values, parts=parts, emit=branch)


def _joined_branches(values: Sequence[Value], tensor: Any) -> Value:
    result = values[0]
    for value in values[1:]:
        result = joined_values(result, value, tensor)
    around = (*result.layout.outer.symbols, *result.layout.inner.symbols)
    if any(symbol.source is tensor for symbol in around):
        # The layout depends on a size of the conditional's result, which the branches cannot know.
        return dataclasses.replace(result, layout=WHOLE)
    return result


def branch(emitter: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Adds a conditional with partitioned branches."""
    return emitter.branch(call, inputs)


_ROUNDS = 8


@rule("While", "StatelessWhile", per_worker=True)
def loop(call: Call) -> Decision | None:
    """Repeats a function while a condition is true.

    The layouts of the loop variables must be equal before and after each round. So the body is
    analyzed repeatedly, until its results have the same layouts as its inputs.
    """
    body = call.attr("body").name
    values = list(call.values)
    part = call.analysis.part(call.op, body, values)
    gathered: set[int] = set()
    # A list without elements cannot be converted to another layout. So its layout is determined
    # last, when the layouts of the other variables, and thus of its future elements, are known.
    lists = [i for i, v in enumerate(values) if v.layout.kind == "unset"]
    for round_ in range(_ROUNDS):
        changed = [_loop_value(part, i, v, gathered) for i, v in enumerate(values)]
        same = list(map(is_same_value, values, changed))
        if all(same):
            break
        if round_ < _ROUNDS // 2 and not all(s for i, s in enumerate(same) if i not in lists):
            for i in lists:
                changed[i] = call.values[i]
        values = changed
        part = call.analysis.part(call.op, body, values)
    else:
        values = [_without_fixed_point(part, i, before) for i, before in enumerate(values)]
        part = call.analysis.part(call.op, body, values)
    condition = call.analysis.part(call.op, call.attr("cond").name, values)
    results = outside(values, part.graph, call.op.outputs)
    inputs = [
        None if v.layout == w.layout else w.layout for v, w in zip(call.values, values, strict=True)
    ]
    return Decision(
        inputs,
        [v.layout for v in results],
        values=results,
        parts=[condition, part],
        emit=repeat,
    )


def _loop_value(part: Any, i: int, before: Value, gathered: set[int]) -> Value:
    """Returns facts about a loop variable that are true before and after a round of the loop.

    Args:
        part: the analysis of the round.
        i: the index of the variable.
        before: the facts before the round.
        gathered: the indices of the variables that are gathered, because their layouts differ
            between rounds. This function adds `i` if necessary.
    """
    tensor = part.graph.inputs[i]
    if part.graph.outputs[i] is tensor:
        return before
    result = joined_values(before, _between_rounds(part.outputs[i], part.graph, tensor), tensor)
    if result.layout.kind == "whole" and before.layout.kind in ("rows", "partial"):
        gathered.add(i)
    if i in gathered:
        result = dataclasses.replace(result, layout=WHOLE)
    return _stable(before, result, tensor)


def _stable(before: Value, after: Value, tensor: Any) -> Value:
    """Keeps a size unknown if it has differed between rounds, so that the analysis terminates."""
    content = after.content
    if isinstance(content, Value) and isinstance(before.content, Value):
        content = _stable(before.content, content, tensor)
    dims = after.dims
    if dims is not None and before.dims is not None and len(dims) == len(before.dims):
        dims = tuple(
            old if old.is_same(new) or _is_size_of(old, tensor) else new
            for old, new in zip(before.dims, dims, strict=True)
        )
    return Value(after.layout, dims, content)


def _is_size_of(dim: Dim, tensor: Any) -> bool:
    return any(symbol.source is tensor for symbol in dim.symbols)


def _between_rounds(value: Value, graph: Any, tensor: Any) -> Value:
    """Translates facts about the result of a round into facts about the input of the next round."""

    def known(dim: Dim | None) -> bool:
        return dim is not None and not any(is_size_in(symbol, graph) for symbol in dim.symbols)

    layout, content = value.layout, value.content
    if layout.kind == "rows" and not (known(layout.outer) and known(layout.inner)):
        layout = WHOLE
    dims = value.dims
    if dims is not None:
        dims = tuple(
            dim if known(dim) or _is_size_of(dim, tensor) else Dim(1, (Symbol(tensor, axis),))
            for axis, dim in enumerate(dims)
        )
    if isinstance(content, Value):
        content = _between_rounds(content, graph, tensor)
    elif content is not None and not isinstance(content, Axes):
        content = content.copy()
        for index, dim in enumerate(content.flat):
            if not known(dim):
                content.flat[index] = None
    return Value(layout, dims, content)


def _without_fixed_point(part: Any, i: int, before: Value) -> Value:
    """Returns facts that are certain about a loop variable if its layout has not become stable."""
    tensor = part.graph.inputs[i]
    if part.graph.outputs[i] is tensor:
        return before
    if tensor.dtype == tf.variant:
        return Value(before.layout)
    return Value(WHOLE, dims_of(tensor))


def repeat(emitter: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Adds a loop with partitioned functions."""
    return emitter.repeat(call, inputs)


# Lists of tensors. A list or an optional has the layout of its elements. Elements that are partial
# sums have the layout `ZEROED_SUM`.


@rule("TensorListReserve", "EmptyTensorList")
def new_list(call: Call) -> Decision | None:
    """Makes an empty list."""
    inputs = [None if is_whole(v) else WHOLE for v in call.layouts]
    element = Value(UNSET, _shape_of_elements(call.content(0), call.op.outputs[0]))
    return Decision(inputs, [UNSET], values=[_list_of(UNSET, element)], emit=any_shape_at(0))


def any_shape_at(where: int) -> Callable[..., Any]:
    """Returns an `emit` function that adds a list operation with an unknown element shape.

    The shape in the program is for the whole batch, but the elements may hold only this worker's
    rows.

    Args:
        where: the index of the operand that is the shape of the elements.
    """

    def add(emitter: Any, call: Any, inputs: Sequence[Any]) -> Any:
        changed = list(inputs)
        changed[where] = tf.constant(-1, changed[where].dtype)
        return emitter.copy(call.op, changed)

    return add


def _list_of(layout: Layout, element: Value | None) -> Value:
    """Returns the facts about a list, given the facts that are true for all its elements."""
    if element is not None:
        element = dataclasses.replace(element, layout=layout)
    return Value(layout, None, element)


def _shape_of_elements(shape: Any, tensor: Any) -> tuple[Dim, ...] | None:
    """Returns the dimensions that a shape contains, with a symbol for each unknown dimension."""
    if shape is None or isinstance(shape, Axes) or shape.ndim != 1:
        return None
    return tuple(
        Dim(1, (Symbol(tensor, axis),)) if dim is None or dim.value == -1 else dim
        for axis, dim in enumerate(shape)
    )


def _without_content(element: Any) -> Value | None:
    """Drops the contents of a list's elements: some elements may be unset, or be replaced later."""
    if not isinstance(element, Value):
        return None
    content = element.content if isinstance(element.content, Value) else None
    return Value(element.layout, element.dims, content)


@rule("TensorListFromTensor")
def list_from_tensor(call: Call) -> Decision | None:
    """Makes a list from the slices of a tensor along its first axis."""
    return _of_slices(call, 1)


@rule("TensorListScatter", "TensorListScatterV2")
def list_of_scattered(call: Call) -> Decision | None:
    """Makes a list from the slices of a tensor along its first axis, at given indices."""
    decision = _of_slices(call, 2)
    if decision is not None and decision.values is not None:
        (value,) = decision.values
        decision.values = [_list_of(value.layout, _without_content(value.content))]
    return decision


def _of_slices(call: Call, shape_at: int) -> Decision | None:
    """Returns the decision for making a list from slices of the first operand.

    Args:
        call: the call.
        shape_at: the index of the operand that is the shape of the elements.
    """
    if call.has("per_worker"):
        return None
    wanted, layout = _layout_of_slices(call, 0)
    inputs: list[Layout | None] = [None if is_whole(v) else WHOLE for v in call.layouts]
    inputs[0] = None if wanted == call.layouts[0] else wanted
    dims = call.dims(0)
    element = Value(layout, None if dims is None else dims[1:])
    emit = any_shape_at(shape_at) if layout.kind == "rows" else None
    return Decision(inputs, [layout], values=[_list_of(layout, element)], emit=emit)


def _layout_of_slices(call: Call, at: int) -> tuple[Layout, Layout]:
    """Returns the layout an operand needs before it is unstacked, and the layout of the slices."""
    layout = call.layouts[at]
    if layout.kind == "rows":
        if layout.axis == 0 or call.dims(at) is None:
            return WHOLE, WHOLE
        return layout, layout.moved_to(layout.axis - 1)
    if layout.kind == "partial":
        layout = ZEROED_SUM if layout.is_sum else WHOLE
    return layout, layout


def _element(call: Call, at: int, shape_at: int, output: int) -> Decision | None:
    """Returns the decision for reading one or all elements of a list.

    Args:
        call: the call.
        at: the index of the operand that is the list.
        shape_at: the index of the operand that is the shape of the elements.
        output: the index of the result that is the element, or the stack of all elements.
    """
    layout, element = call.layouts[at], call.content(at)
    if call.has("per_worker"):
        return None
    tensor = call.op.outputs[output]
    made = WHOLE if layout.kind == "unset" else layout
    stacked = call.type in ("TensorListStack", "TensorListGather")
    given = _shape_of_elements(call.content(shape_at), tensor)
    dims = _known_shape(element, given)
    value = Value(made, dims_of(tensor), _content_of(element, tensor))
    if tensor.dtype == tf.variant:
        value = Value(layout, None, _content_of(element, tensor))
    elif dims is not None and tensor.shape.rank in (None, len(dims) + stacked):
        known = [None if _is_of_list(dim) else dim for dim in dims]
        value = Value(made, merged(tensor, [None] * stacked + known), value.content)
    if stacked:
        layout_out = made.moved_to(made.axis + 1) if made.kind == "rows" else made
        value = Value(layout_out, value.dims)
    inputs: list[Layout | None] = [
        None if i == at or is_whole(v) else WHOLE for i, v in enumerate(call.layouts)
    ]
    values = [value]
    if len(call.op.outputs) > 1:
        rest = _list_of(layout, element)
        values = [rest, value] if output == 1 else [value, rest]
    emit = element_of_shape(shape_at, output, made, dims, call.batch, stacked)
    return Decision(inputs, [v.layout for v in values], values=values, emit=emit)


def _is_of_list(dim: Dim) -> bool:
    """Whether a dimension is a size of a list's elements, and so may differ between elements."""
    return any(s.source is not None and s.source.dtype == tf.variant for s in dim.symbols)


def _known_shape(element: Any, given: Any) -> tuple[Dim, ...] | None:
    dims = element.dims if isinstance(element, Value) else None
    if dims is None or given is None or len(dims) != len(given):
        return dims if dims is not None else given
    return tuple(
        b if a.value is None and (b.value is not None or _is_of_list(a)) else a
        for a, b in zip(dims, given, strict=True)
    )


def _content_of(element: Any, tensor: Any) -> Any:
    """Returns the content that is common to all elements of a list."""
    if not isinstance(element, Value):
        return None
    return element.content


def element_of_shape(
    where: int, output: int, layout: Layout, dims: Any, batch: Symbol, stacked: bool
) -> Callable[..., Any]:
    """Returns an `emit` function for an operation that reads elements of a list.

    The element shape in the program is for the whole batch, but an element may hold only this
    worker's rows.

    Args:
        where: the index of the operand that is the shape of the elements.
        output: the index of the result that is the element, or the stack of all elements.
        layout: the layout of an element.
        dims: the dimensions of an element; None if they are unknown.
        batch: the symbol for the number of rows.
        stacked: whether the result stacks all elements along a new axis.
    """

    def size(emitter: Any, axis: int, dim: Dim, dtype: Any) -> Any:
        if layout.kind == "rows" and axis == layout.axis:
            rest = (layout.outer * layout.inner).value
            return -1 if rest is None else emitter.own_rows(dtype, rest)
        if dim == Dim(1, (batch,)):
            return emitter.all_rows(dtype)
        return -1 if dim.value is None else dim.value

    def add(emitter: Any, call: Any, inputs: Sequence[Any]) -> Any:
        changed = list(inputs)
        dtype = changed[where].dtype
        if dims is not None:
            sizes = [size(emitter, axis, dim, dtype) for axis, dim in enumerate(dims)]
            changed[where] = (
                tf.stack([tf.cast(n, dtype) for n in sizes]) if sizes else (tf.zeros([0], dtype))
            )
        elif layout.kind == "rows":
            changed[where] = tf.constant(-1, dtype)
        results = list(emitter.copy(call.op, changed))
        tensor = call.op.outputs[output]
        if layout.kind == "rows" and tensor.dtype != tf.variant and tensor.shape.rank is not None:
            shape = tensor.shape.as_list()
            shape[layout.axis + stacked] = None
            results[output] = tf.ensure_shape(results[output], shape)
        return results

    return add


@rule("TensorListStack", "TensorListGather")
def list_stack(call: Call) -> Decision | None:
    """Stacks all or some elements of a list along a new first axis."""
    return _element(call, 0, 1 if call.type == "TensorListStack" else 2, 0)


@rule("TensorListGetItem")
def list_get_item(call: Call) -> Decision | None:
    """Reads an element of a list."""
    return _element(call, 0, 2, 0)


@rule("TensorListPopBack")
def list_pop(call: Call) -> Decision | None:
    """Removes the last element of a list; returns the list and the element."""
    return _element(call, 0, 1, 1)


@rule("TensorListSetItem")
def list_set_item(call: Call) -> Decision | None:
    """Replaces an element of a list."""
    return _with_element(call, 2)


@rule("TensorListPushBack")
def list_push(call: Call) -> Decision | None:
    """Appends an element to a list."""
    return _with_element(call, 1)


@rule("TensorListScatterIntoExistingList")
def list_scatter(call: Call) -> Decision | None:
    """Replaces elements of a list by the slices of a tensor along its first axis."""
    return _with_element(call, 1, stacked=True)


def _with_element(call: Call, item: int, *, stacked: bool = False) -> Decision | None:
    held, given = call.values[0], call.values[item]
    if call.has("per_worker"):
        return None
    if stacked:
        _, slices = _layout_of_slices(call, item)
        given = Value(slices, None if given.dims is None else given.dims[1:], given.content)
    known = held.content if isinstance(held.content, Value) else None
    layout = held.layout  # All elements get the layout of the list.
    if layout.kind == "unset":
        layout = given.layout
        if layout.kind == "partial":
            layout = ZEROED_SUM if layout.is_sum else WHOLE
    elif layout.kind == "rows" and not _has_rows(given, layout, known):
        layout = WHOLE
    elif layout.kind == "whole" and given.layout.kind == "rows" and known is not None:
        layout = given.layout if _has_rows(known, given.layout, given) else WHOLE
    wanted = layout.moved_to(layout.axis + 1) if stacked and layout.kind == "rows" else layout
    inputs: list[Layout | None] = [None if is_whole(v) else WHOLE for v in call.layouts]
    inputs[0] = None if held.layout.kind == "unset" or held.layout == layout else layout
    inputs[item] = None if call.layouts[item] == wanted else wanted
    element = dataclasses.replace(given, layout=layout)
    if held.layout.kind != "unset" and known is not None:
        before = dataclasses.replace(known, layout=layout)
        element = joined_values(before, element, call.op.outputs[0])
    elif held.layout.kind != "unset":
        element = Value(layout)
    kept = element if call.type == "TensorListPushBack" else _without_content(element)
    return Decision(inputs, [layout], values=[_list_of(layout, kept)])


def _has_rows(given: Value, layout: Layout, known: Value | None) -> bool:
    """Whether a value can be cut along the same rows as the elements of a list."""
    if given.layout == layout:
        return True
    dims = None if known is None else known.dims
    if dims is None or given.dims is None or len(dims) != len(given.dims):
        return False
    return dims[layout.axis].is_same(given.dims[layout.axis])


@rule("TensorListConcatV2")
def list_concat(call: Call) -> Decision | None:
    """Concatenates a list's elements along their first axis, and returns the elements' lengths."""
    layout, element = call.layouts[0], call.content(0)
    joined_, lengths = call.op.outputs
    if call.has("per_worker") or layout.kind not in ("rows", "partial"):
        return None
    inputs = [None, *(None if is_whole(v) else WHOLE for v in call.layouts[1:])]
    count = Value(WHOLE, dims_of(lengths))
    if layout.is_sum:
        return Decision(inputs, [layout, WHOLE], values=[Value(layout, dims_of(joined_)), count])
    dims = element.dims if isinstance(element, Value) else None
    if layout.kind != "rows" or dims is None or _is_of_list(dims[layout.axis]):
        return None
    sizes = [None, *(None if _is_of_list(dim) else dim for dim in dims[1:])]
    made = layout
    if layout.axis == 0:
        assert count.dims is not None
        (times,) = count.dims
        made = dataclasses.replace(layout, outer=times * layout.outer)
        sizes[0] = times * dims[0]
    value = Value(made, merged(joined_, sizes))
    return Decision(inputs, [made, WHOLE], values=[value, count], emit=concat_own_rows)


def concat_own_rows(emitter: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Concatenates this worker's rows of a list's elements; the lengths are for the whole batch."""
    elements, shape, lengths = inputs
    made, tensor = call.decision.outputs[0], call.op.outputs[0]
    along = call.layouts[0].axis == 0  # The elements are joined along the axis of the rows.
    own, whole = emitter.own_rows(tf.int64), emitter.all_rows(tf.int64)
    if along:
        lengths = lengths // whole * own
    result, found = emitter.copy(call.op, [elements, tf.constant(-1, shape.dtype), lengths])
    if tensor.shape.rank is not None:
        sizes = tensor.shape.as_list()
        sizes[made.axis] = None
        result = tf.ensure_shape(result, sizes)
    return [result, found // own * whole if along else found]


@rule("TensorListSplit")
def list_split(call: Call) -> Decision | None:
    """Splits a tensor along its first axis into parts of given lengths."""
    layout, dims, lengths = call.layouts[0], call.dims(0), call.content(2)
    if call.has("per_worker") or dims is None:
        return None
    if layout.kind not in ("rows", "partial"):
        return call.all(WHOLE) if all(map(is_whole, call.layouts)) else None
    inputs: list[Layout | None] = [
        None,
        *(None if is_whole(v) else WHOLE for v in call.layouts[1:]),
    ]
    if layout.kind == "partial":
        wanted = ZEROED_SUM if layout.is_sum else WHOLE
        inputs[0] = None if layout == wanted else wanted
        return Decision(inputs, [wanted], values=[_list_of(wanted, None)])
    if layout.axis:
        element = Value(layout, (Dim(1, (Symbol(call.op.outputs[0], 0),)), *dims[1:]))
        return Decision(inputs, [layout], values=[_list_of(layout, element)], emit=any_shape_at(1))
    # The tensor is split along the axis of the rows, so each part must repeat all rows.
    times = _number_of_parts(call, lengths, dims[0])
    outer = None if times is None else layout.outer.divided_by(times)
    size = None if times is None else dims[0].divided_by(times)
    if outer is None or size is None:
        return None
    made = dataclasses.replace(layout, outer=outer)
    element = Value(made, (size, *dims[1:]))
    return Decision(inputs, [made], values=[_list_of(made, element)], emit=split_own_rows)


def _number_of_parts(call: Call, lengths: Any, size: Dim) -> Dim | None:
    """Returns the number of parts of a split; None if the parts may have different lengths."""
    if lengths is None:
        # The size contains a symbol for the number of parts in the gradient of
        # `TensorListConcatV2`.
        source = call.op.inputs[2]
        symbols = [s for s in size.symbols if s.source is source]
        if symbols:
            return Dim(1, (symbols[0],))
        return None
    sizes = list(lengths.ravel())
    times = Dim(len(sizes))
    one = size.divided_by(times)
    same = one is not None and all(n is not None and n.is_same(one) for n in sizes)
    return times if same else None


def split_own_rows(emitter: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Splits this worker's rows; converts the lengths, which are for the whole batch."""
    tensor, shape, lengths = inputs
    own, whole = emitter.own_rows(lengths.dtype), emitter.all_rows(lengths.dtype)
    return emitter.copy(call.op, [tensor, tf.constant(-1, shape.dtype), lengths // whole * own])


@rule("TensorListLength", "TensorListElementShape")
def about_list(call: Call) -> Decision | None:
    """Returns the length of a list, or the shape of its elements."""
    if call.type == "TensorListLength" or call.has("per_worker"):
        return Decision([None], [WHOLE])
    element = call.content(0)
    if call.layouts[0].kind != "rows" or not isinstance(element, Value) or element.dims is None:
        return Decision([None], [WHOLE])
    dims = [None if _is_of_list(dim) else dim for dim in element.dims]
    content = array(dims) if all(d is None or d.value is not None for d in dims) else None
    return Decision([None], [WHOLE], values=[Value(WHOLE, (Dim(len(dims)),), content)])


@rule("TensorListResize")
def list_resize(call: Call) -> Decision | None:
    """Resizes a list."""
    inputs = [None, None if is_whole(call.layouts[1]) else WHOLE]
    layout = call.layouts[0]
    value = _list_of(layout, _without_content(call.content(0)))
    return Decision(inputs, [layout], values=[value])


def of_lists(call: Call) -> Decision | None:
    """Returns the decision for an identity, sum or zeros if the operands are lists or optionals."""
    if call.has("per_worker"):
        return None
    values = [v for v in call.values if v.layout.kind != "unset"] or list(call.values)
    layout = _of_all_lists(values)
    inputs: list[Layout | None] = [
        None if v.kind == "unset" or v == layout else layout for v in call.layouts
    ]
    contents = [
        dataclasses.replace(v.content, layout=layout) if isinstance(v.content, Value) else None
        for v in values
    ]
    element = contents[0]
    for other in contents[1:]:
        if element is not None:
            same = joined_values(element, other, call.op.outputs[0]) if other is not None else None
            element = same
    if call.type not in ("Identity", "StopGradient", "PreventGradient"):
        element = _without_content(element)
    return Decision(inputs, [layout], values=[_list_of(layout, element)])


def _of_all_lists(values: Sequence[Value]) -> Layout:
    """Returns the layout of a sum of lists; it has rows if all elements have the same rows."""
    layouts = [v.layout for v in values]
    if all(v == layouts[0] for v in layouts):
        return layouts[0]
    cut = next((v for v in values if v.layout.kind == "rows"), None)
    if cut is None:
        return ZEROED_SUM if all(v.kind == "whole" or v.is_sum for v in layouts) else WHOLE
    elements = [v.content if isinstance(v.content, Value) else Value(v.layout) for v in values]
    known = cut.content if isinstance(cut.content, Value) else None
    same = all(_has_rows(element, cut.layout, known) for element in elements)
    return cut.layout if same else WHOLE


@rule("OptionalFromValue")
def optional(call: Call) -> Decision | None:
    """Wraps a value in an optional."""
    if len(call.values) != 1 or call.has("per_worker"):
        return None
    given = call.values[0]
    layout = given.layout
    if layout.kind == "partial":
        layout = ZEROED_SUM if layout.is_sum else WHOLE
    element = dataclasses.replace(given, layout=layout)
    wanted = None if layout == given.layout else layout
    return Decision([wanted], [layout], values=[_list_of(layout, element)])


@rule("OptionalNone")
def no_value(call: Call) -> Decision | None:
    """Makes an empty optional."""
    return Decision([], [UNSET], values=[Value(UNSET)])


@rule("OptionalHasValue")
def has_value(call: Call) -> Decision | None:
    """Whether an optional has a value."""
    return Decision([None], [WHOLE])


@rule("OptionalGetValue")
def value_of_optional(call: Call) -> Decision | None:
    """Unwraps an optional."""
    if len(call.op.outputs) != 1 or call.has("per_worker"):
        return None
    layout, element, tensor = call.layouts[0], call.content(0), call.op.outputs[0]
    made = WHOLE if layout.kind == "unset" else layout
    value = Value(made, dims_of(tensor))
    if isinstance(element, Value):
        dims = element.dims
        if dims is not None and tensor.dtype != tf.variant:
            dims = merged(tensor, [None if _is_of_list(dim) else dim for dim in dims])
        value = Value(made, dims, element.content)
    return Decision([None], [made], values=[value], emit=with_unknown_rows)


def with_unknown_rows(emitter: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Unwraps an optional; the number of rows in the static shape is unknown."""
    layout, tensor = call.decision.outputs[0], call.op.outputs[0]
    shape = tensor.shape
    if layout.kind == "rows" and shape.rank is not None and tensor.dtype != tf.variant:
        sizes = shape.as_list()
        sizes[layout.axis] = None
        shape = tf.TensorShape(sizes)
    return tf.raw_ops.OptionalGetValue(
        optional=inputs[0], output_types=[tensor.dtype], output_shapes=[shape]
    )


@rule("FakeParam")
def not_computed(call: Call) -> Decision | None:
    """Stands for a value that only the other branch of a conditional computes."""
    return Decision([], [UNSET], values=[Value(UNSET, dims_of(call.op.outputs[0]))])
