"""How each type of operation is partitioned along the rows of a batch: one table.

A rule takes a `Call` and returns a `Decision`, or None if it does not apply to these operands. Then
the operands are gathered and the operation acts on the whole batch, which is always right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.global_view.analysis import (
    Analysis,
    Call,
    Decision,
    Value,
    as_ints,
    dims_of,
    is_same_value,
    is_size_in,
    joined_values,
    merged,
    outside,
)
from tfdist.global_view.contents import Axes, array, broadcast
from tfdist.global_view.layout import (
    LOCAL,
    ONE,
    PARTIAL_SUM,
    SETTLED_SUM,
    UNSET,
    WHOLE,
    Dim,
    Layout,
    Symbol,
    aligned,
    partial,
    product,
    rows,
)

CONTRIBUTION = "_tfdist_contribution"
"""Marks operations whose results are what a worker contributes to sums of the program."""

EQUAL = "_tfdist_equal"
"""Marks operations whose results are equal on all workers, such as those sums."""

Rule = Callable[[Call], "Decision | None"]
RULES: dict[str, Rule] = {}


def rule(*types: str) -> Callable[[Rule], Rule]:
    """Registers the rule of types of operations."""

    def register(function: Rule) -> Rule:
        for name in types:
            assert name not in RULES, name
            RULES[name] = function
        return function

    return register


def names(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


def is_plain(layout: Layout) -> bool:
    """Whether a value has the same meaning on each worker as a whole."""
    return layout.kind in ("whole", "unset")


# Elementwise operations, with broadcasting.

_ELEMENTWISE = names(
    """
    _FusedMulAdd Abs Acos Acosh Add AddV2 Angle ApproximateEqual Asin Asinh AsString Atan Atan2
    Atanh BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1
    BesselK1e BesselY0 BesselY1 Betainc Bitcast BitwiseAnd BitwiseOr BitwiseXor Bucketize Cast Ceil
    CheckNumerics CheckNumericsV2 ClipByValue Complex ComplexAbs Conj Cos Cosh Dawsn DebugIdentityV2
    DecodeBase64 DecodeRaw Digamma Div DivNoNan Elu EluGrad EncodeBase64 EnsureShape Equal Erf Erfc
    Erfcinv Erfinv Exp Expint Expm1 FakeQuantWithMinMaxArgs FakeQuantWithMinMaxArgsGradient Floor
    FloorDiv FloorMod FresnelCos FresnelSin Greater GreaterEqual Identity Igamma Igammac IgammaGradA
    Imag Inv Invert InvGrad IsFinite IsInf IsNan LeakyRelu LeakyReluGrad LeftShift Less LessEqual
    Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod Mul MulNoNan Ndtri Neg
    NextAfter NotEqual OnesLike PlaceholderWithDefault Polygamma PopulationCount Pow PreventGradient
    RandomGammaGrad Real RealDiv Reciprocal ReciprocalGrad RegexFullMatch RegexReplace Relu Relu6
    Relu6Grad ReluGrad RightShift Rint Round Rsqrt RsqrtGrad SelectV2 Selu SeluGrad Sigmoid
    SigmoidGrad Sign Sin Sinh Snapshot Softplus SoftplusGrad Softsign SoftsignGrad Spence Sqrt
    SqrtGrad Square SquaredDifference StaticRegexFullMatch StaticRegexReplace StopGradient
    StringJoin StringLength StringLower StringStrip StringToHashBucket StringToHashBucketFast
    StringToHashBucketStrong StringToNumber StringUpper Sub Tan Tanh TanhGrad TruncateDiv
    TruncateMod UnicodeTranscode Xdivy Xlog1py Xlogy ZerosLike Zeta
    """
)
# Of a partial sum, the operations that may be applied to each part: of one operand, and of two,
# where only the named operand may be partial.
_LINEAR = set(
    names("Identity Snapshot StopGradient PreventGradient Neg Conj Real Imag DebugIdentityV2")
)
_LINEAR_IN = {
    "Mul": (0, 1),
    "Div": (0,),
    "RealDiv": (0,),
    "DivNoNan": (0,),
    "MulNoNan": (0,),
    "Xdivy": (0,),
}
_SUMS = set(names("Add AddV2 Sub AddN"))
_CONSTANT = {"ZerosLike": "zero", "OnesLike": "one"}


@rule(*_ELEMENTWISE, "AddN")
def elementwise(call: Call) -> Decision | None:
    """Acts on each element; operands are broadcast."""
    if call.op.outputs[0].dtype == tf.variant:
        return of_lists(call)
    if call.has("local"):
        return None
    if call.type == "Bitcast" and call.rank(0) != call.out_rank():
        return None  # The last axis is made, or taken away.
    if call.has("partial") and not call.has("rows"):
        return _of_partials(call)
    target = _target_rows(call)
    if target is None:
        return None if call.has("rows") else _all_whole(call)
    return _along(call, target)


def _all_whole(call: Call) -> Decision | None:
    if call.has("partial"):
        return None
    dims = _broadcast_dims(call)
    return call.all(WHOLE, dims=None if dims is None else [dims])


def _broadcast_dims(call: Call) -> tuple[Dim, ...] | None:
    known = [v.dims for v in call.values if v.dims is not None]
    if len(known) != len(call.values):
        return None
    result: list[Dim | None] = []
    for dims in known:
        result = broadcast(result, list(dims))
    rank = call.out_rank()
    if rank is not None and rank != len(result):
        return None
    return merged(call.op.outputs[0], result)


def _of_partials(call: Call) -> Decision | None:
    """Operands that are whole or partial."""
    hows = {v.how for v in call.layouts if v.kind == "partial"}
    result = next(v for v in call.layouts if v.kind == "partial")
    dims = _broadcast_dims(call)
    more: dict[str, Any] = {} if dims is None else {"dims": [dims]}
    if call.type in _CONSTANT:
        return call.all(WHOLE, **more)
    if len(hows) > 1:
        return None
    if call.type in ("Identity", "Snapshot", "StopGradient", "PreventGradient"):
        return call.all(result, **more)
    if not result.is_sum:
        return None
    if call.type in _LINEAR:
        return call.all(result, **more)
    if call.type == "Cast":
        return call.all(result, **more) if _widens(call) else None
    if call.type in _SUMS:
        inputs, result = _sums(call.layouts)
        return Decision(inputs, [result], **more)
    allowed = _LINEAR_IN.get(call.type, ())
    which = [i for i, v in enumerate(call.layouts) if v.kind == "partial"]
    if len(which) == 1 and which[0] in allowed:
        return call.all(result, **more)
    return None


def _sums(layouts: Sequence[Layout]) -> tuple[list[Layout | None], Layout]:
    """The layouts of whole or partial operands that are added or put together, and the result's."""
    if all(v == PARTIAL_SUM for v in layouts):
        return [None] * len(layouts), PARTIAL_SUM
    return [None if v == SETTLED_SUM else SETTLED_SUM for v in layouts], SETTLED_SUM


def _widens(call: Call) -> bool:
    """Whether a cast keeps all values, so that it may come before a sum."""
    given, to = call.op.inputs[0].dtype, call.op.outputs[0].dtype
    if not to.is_floating:
        return bool(given.is_integer and to.is_integer and to.size >= given.size)
    return not given.is_floating or bool(to.size > given.size)


def _target_rows(call: Call) -> tuple[int, Layout] | None:
    """The axis, counted from the end, and the layout of the first operand with rows."""
    ranks = [call.rank(i) for i in range(len(call.values))]
    if len(ranks) == 1 and call.layouts[0].kind == "rows":
        return (call.layouts[0].axis - (ranks[0] or 0), call.layouts[0])
    if None in ranks:
        return None
    best: tuple[int, Layout] | None = None
    size = -1
    for i, layout in enumerate(call.layouts):
        rank = ranks[i]
        assert rank is not None
        if layout.kind == "rows" and rank > size:
            best, size = (layout.axis - rank, layout), rank
    return best


def _along(call: Call, target: tuple[int, Layout]) -> Decision | None:
    """Acts on own rows of an axis, counted from the end."""
    axis, layout = target
    inputs: list[Layout | None] = []
    row = None
    for i, own in enumerate(call.layouts):
        dims = call.dims(i)
        if own is layout and dims is not None:
            row = dims[axis]
    for i, own in enumerate(call.layouts):
        dims = call.dims(i)
        if dims is None:
            inputs.append(None)
            continue
        if -axis > len(dims) or dims[axis] == ONE:
            inputs.append(None if is_plain(own) else WHOLE)
            continue
        if row is not None and row.value is None and dims[axis].value is not None:
            return None  # Equal only if the batch has a certain number of rows.
        wanted = layout.moved_to(len(dims) + axis)
        inputs.append(None if own == wanted else wanted)
    if len(call.values) == 1 and call.dims(0) is None:
        return call.all(layout)
    ranks = [call.rank(i) for i in range(len(call.values))]
    rank = max(r for r in ranks if r is not None)
    dims_known = _broadcast_dims(call)
    if dims_known is not None and row is not None:
        changed = list(dims_known)
        changed[axis] = row
        dims_known = tuple(changed)
    emit = relax_shape if call.type in ("EnsureShape", "PlaceholderWithDefault") else None
    return Decision(
        inputs,
        [layout.moved_to(rank + axis)] * len(call.op.outputs),
        dims=None if dims_known is None else [dims_known],
        emit=emit,
    )


def relax_shape(lane: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Adds an operation with an attribute `shape`, which does not know the number of own rows."""
    shape = tf.TensorShape(call.op.get_attr("shape"))
    axis = call.decision.outputs[0].axis
    if shape.rank is not None:
        sizes = shape.as_list()
        sizes[axis] = None
        shape = tf.TensorShape(sizes)
    if call.op.type == "EnsureShape":
        return [tf.raw_ops.EnsureShape(input=inputs[0], shape=shape)]
    return [tf.raw_ops.PlaceholderWithDefault(input=inputs[0], shape=shape)]


@rule("Select")
def select(call: Call) -> Decision | None:
    """Chooses elements, or slices by a vector."""
    if call.rank(0) is None or call.rank(1) is None:
        return None
    if call.rank(0) in (call.rank(1), 0):
        return elementwise(call)
    layout = next((v for v in call.layouts if v.kind == "rows" and v.axis == 0), None)
    if layout is None:
        return None
    inputs = [None if v == layout else layout for v in call.layouts]
    return Decision(inputs, [layout], dims=[call.dims(1)])


# Reductions.

_REDUCTIONS = {
    "Sum": "sum",
    "Mean": "mean",
    "Max": "max",
    "Min": "min",
    "Prod": "product",
    "All": "all",
    "Any": "any",
    "EuclideanNorm": "",
}


@rule(*_REDUCTIONS)
def reduction(call: Call) -> Decision | None:
    """Reduces over axes."""
    dims, layout = call.dims(0), call.layouts[0]
    if call.has("local") or not is_plain(call.layouts[1]):
        return None
    axes = call.content(1)
    rank = None if dims is None else len(dims)
    known = as_ints(axes)
    if known is not None and rank is not None:
        known = [a % rank if rank else 0 for a in known]
    keep = bool(call.attr("keep_dims"))
    if isinstance(axes, Axes):
        return _sum_of_broadcast(call, axes, keep)
    out: list[Any] | None = None
    if known is not None and dims is not None:
        out = [ONE if a in known else d for a, d in enumerate(dims) if keep or a not in known]
    more: dict[str, Any] = {}
    if out is not None and call.out_rank() in (None, len(out)):
        more["dims"] = [merged(call.op.outputs[0], out)]
    if layout.kind == "partial":
        if layout.is_sum and call.type in ("Sum", "Mean"):
            return call.all(layout, **more)
        return None
    if layout.kind != "rows":
        return call.all(WHOLE, **more)
    if known is None:
        return None
    if layout.axis not in known:
        moved = layout.axis if keep else layout.axis - sum(a < layout.axis for a in known)
        return call.all(layout.moved_to(moved), **more)
    how = _REDUCTIONS[call.type]
    if not how:
        return None
    if how == "mean":
        if not (call.op.inputs[0].dtype.is_floating or call.op.inputs[0].dtype.is_complex):
            return None
        return call.all(PARTIAL_SUM, emit=mean_of_rows, **more)
    return call.all(_reduced(call), **more)


def _sum_of_broadcast(call: Call, axes: Axes, keep: bool) -> Decision | None:
    """Sums the gradient of an operand along the axes along which it was broadcast."""
    dims, layout = call.dims(0), call.layouts[0]
    more: dict[str, Any] = {}
    unsure = axes.possible - axes.certain
    if dims is not None and keep:
        sizes = [
            ONE if a in axes.certain or d == ONE else None if a in unsure else d
            for a, d in enumerate(dims)
        ]
        more["dims"] = [merged(call.op.outputs[0], sizes)]
    elif dims is not None and not unsure:
        sizes = [d for a, d in enumerate(dims) if a not in axes.certain]
        if call.out_rank() in (None, len(sizes)):
            more["dims"] = [merged(call.op.outputs[0], sizes)]
    if layout.kind == "partial":
        return call.all(layout, **more) if layout.is_sum and call.type == "Sum" else None
    if layout.kind != "rows":
        return call.all(WHOLE, **more)
    if layout.axis in axes.certain:
        return call.all(_reduced(call), **more) if call.type == "Sum" else None
    if layout.axis in unsure:
        return None
    if keep:
        return call.all(layout, **more)
    if any(a < layout.axis for a in unsure):
        return None
    return call.all(
        layout.moved_to(layout.axis - sum(a < layout.axis for a in axes.certain)), **more
    )


def _reduced(call: Call) -> Layout:
    return partial(_REDUCTIONS[call.type])


def mean_of_rows(lane: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """The contribution of own rows to a mean: their mean, times their share of all rows."""
    (mean,) = lane.copy(call.op, inputs)
    return [mean * lane.fraction(mean.dtype)]


@rule("BiasAddGrad")
def bias_gradient(call: Call) -> Decision | None:
    """Sums over all axes but the channels."""
    layout = call.layouts[0]
    if layout.kind == "partial":
        return call.all(layout) if layout.is_sum else None
    if layout.kind != "rows":
        return None
    rank = call.rank(0)
    channels = 1 if call.attr("data_format") == b"NCHW" else (rank or 0) - 1
    return call.all(layout.moved_to(0) if layout.axis == channels else PARTIAL_SUM)


@rule("L2Loss")
def l2_loss(call: Call) -> Decision | None:
    """Half the sum of squares."""
    return call.all(PARTIAL_SUM) if call.layouts[0].kind == "rows" else None


# Shapes.


@rule("Shape", "ShapeN", "Size", "Rank")
def shape_of(call: Call) -> Decision | None:
    """The shape for the whole batch."""
    if not call.has("rows") or call.type == "Rank":
        return call.all(WHOLE)
    return call.all(WHOLE, emit=whole_shapes)


def whole_shapes(lane: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """The shapes of tensors with own rows, with the number of all rows."""
    own = lane.copy(call.op, inputs)
    if call.op.type == "Size":
        return [own[0] // lane.own_rows(own[0].dtype) * lane.all_rows(own[0].dtype)]
    return [
        _whole_shape(lane, shape, tensor.shape, layout) if layout.kind == "rows" else shape
        for shape, tensor, layout in zip(own, inputs, call.layouts, strict=True)
    ]


def _whole_shape(lane: Any, own: Any, static: Any, layout: Layout) -> Any:
    axis, rank = layout.axis, own.shape[0]
    size = lane.all_rows(own.dtype)
    if not layout.is_plain:
        size = own[axis] // lane.own_rows(own.dtype) * size
    if rank is None:
        return tf.tensor_scatter_nd_update(own, [[axis]], [size])
    parts = [size if i == axis else own[i] if static[i] is None else static[i] for i in range(rank)]
    return tf.stack([tf.cast(part, own.dtype) for part in parts])


@rule("Reshape")
def reshape(call: Call) -> Decision | None:
    """Gives other dimensions to the same elements."""
    layout, dims, shape = call.layouts[0], call.dims(0), call.content(1)
    if call.has("local") or not is_plain(call.layouts[1]):
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
    """The dimensions behind a reshape, as far as they are known."""
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
    if axis is None or dims is None or call.has("local"):
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
    if dims is None or call.has("local"):
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


def squeeze_axes(lane: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Squeezes the axes that have size one for the whole batch."""
    axes = [i for i, d in enumerate(call.values[0].dims) if d == ONE]
    return [tf.squeeze(inputs[0], axes)]


@rule("Transpose", "ConjugateTranspose")
def transpose(call: Call) -> Decision | None:
    """Permutes axes."""
    dims, layout, order = call.dims(0), call.layouts[0], call.ints(1)
    if dims is None or call.has("local"):
        return None
    if order is None:
        return None if layout.kind == "rows" else call.all(layout)
    new = tuple(dims[a] for a in order)
    if layout.kind == "rows":
        layout = layout.moved_to(order.index(layout.axis))
    return call.all(layout, dims=[new])


@rule("BroadcastTo")
def broadcast_to(call: Call) -> Decision | None:
    """Repeats along axes of size one, and new ones."""
    return _spread(call, shape_at=1, given=0)


@rule("Fill")
def fill(call: Call) -> Decision | None:
    """Makes a tensor of one number."""
    return _spread(call, shape_at=0, given=1)


@rule("Empty")
def empty(call: Call) -> Decision | None:
    """Makes a tensor that is written later."""
    shape = call.content(0)
    if shape is None or not is_plain(call.layouts[0]):
        return None
    new = merged(call.op.outputs[0], list(shape.ravel()))
    axis = _axis_with_rows(call, new)
    if axis is None:
        return call.all(WHOLE, dims=[new])
    inner = new[axis].divided_by(Dim(1, (call.batch,)))
    assert inner is not None
    return call.all(rows(axis, inner=inner), dims=[new], local_shapes={0: axis})


def _spread(call: Call, shape_at: int, given: int) -> Decision | None:
    shape, layout, dims = call.content(shape_at), call.layouts[given], call.dims(given)
    if call.has("local") or not is_plain(call.layouts[shape_at]) or shape is None or dims is None:
        return None if call.has("rows") or call.has("local") else call.all(layout)
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
    if axis_of_rows is not None and layout.kind == "whole":
        at = axis_of_rows - rank
        missing = -at > len(dims) or dims[at] == ONE
        if missing:
            inner = new[axis_of_rows].divided_by(Dim(1, (call.batch,)))
            assert inner is not None
            result = rows(axis_of_rows, inner=inner)
            return call.all(result, dims=[new], local_shapes={shape_at: axis_of_rows})
    return call.all(WHOLE if layout.kind == "unset" else layout, dims=[new])


def _axis_with_rows(call: Call, dims: Sequence[Dim]) -> int | None:
    """The first axis whose size is a multiple of the number of rows."""
    unit = Dim(1, (call.batch,))
    for axis, dim in enumerate(dims):
        if dim.has(call.batch) and dim.divided_by(unit) is not None:
            return axis
    return None


@rule("Tile")
def tile(call: Call) -> Decision | None:
    """Repeats along axes."""
    layout, dims, times = call.layouts[0], call.dims(0), call.content(1)
    if call.has("local") or not is_plain(call.layouts[1]) or dims is None:
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
    for axis, factor in enumerate(factors):
        if layout.kind == "whole" and factor is not None and factor.has(call.batch):
            if dims[axis] != ONE:
                continue
            inner = factor.divided_by(Dim(1, (call.batch,)))
            if inner is None:
                continue
            return call.all(rows(axis, inner=inner), dims=[new], local_shapes={1: axis})
    return call.all(layout, dims=[new])


@rule("Pack")
def pack(call: Call) -> Decision | None:
    """Stacks tensors along a new axis."""
    target = _same_rows(call, range(len(call.values)))
    if call.has("local"):
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
    """Tensors put together of which some are partial sums."""
    parts = call.layouts if last is None else call.layouts[:last]
    if any(v.kind == "rows" for v in parts):
        return None
    if all(is_plain(v) for v in parts):
        return call.all(WHOLE, dims=None if dims is None else [dims])
    if not all(v.is_sum for v in parts if v.kind == "partial"):
        return None
    inputs, result = _sums(parts)
    inputs += [None] * (len(call.layouts) - len(parts))
    return Decision(inputs, [result], dims=None if dims is None else [dims])


def _same_rows(call: Call, which: Any) -> Layout | None:
    """The layout of the first of some operands that has rows."""
    return next((call.layouts[i] for i in which if call.layouts[i].kind == "rows"), None)


@rule("Unpack")
def unpack(call: Call) -> Decision | None:
    """Takes apart along an axis."""
    dims, layout = call.dims(0), call.layouts[0]
    if dims is None or call.has("local"):
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
    """Joins tensors along an axis."""
    axis, rank = call.ints(len(call.values) - 1), call.rank(0)
    parts = range(len(call.values) - 1)
    if axis is None or rank is None or call.has("local"):
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
    target = _same_rows(call, parts)
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
    # Parts with the same rows, one behind the other.
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
    """Takes apart along an axis, in several pieces."""
    data, axis_at = (1, 0) if call.type == "Split" else (0, 2)
    dims, layout, axis = call.dims(data), call.layouts[data], call.ints(axis_at)
    if dims is None or axis is None or call.has("local"):
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
    # Each piece has some of the repetitions of all rows.
    unit = dims[at].divided_by(layout.outer)
    if unit is None:
        return None
    outers = [sizes[at].divided_by(unit) for sizes in new]
    if any(n is None or n.value is None for n in outers):
        return None
    layouts = [rows(at, n, layout.inner) for n in outers]  # type: ignore[arg-type]
    emit = split_in_sizes if call.type == "SplitV" else None
    return Decision([None] * len(call.values), layouts, dims=new, emit=emit)


def split_in_sizes(lane: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Takes apart repetitions of own rows."""
    data, sizes, axis = inputs
    own = sizes // lane.all_rows(sizes.dtype) * lane.own_rows(sizes.dtype)
    return lane.copy(call.op, [data, tf.where(sizes < 0, sizes, own), axis])


@rule("Slice")
def slice_(call: Call) -> Decision | None:
    """Takes a range along each axis."""
    dims, layout = call.dims(0), call.layouts[0]
    begin, size = call.content(1), call.content(2)
    if call.has("local") or not all(map(is_plain, call.layouts[1:])) or dims is None:
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
    # All rows, or some of the repetitions of all rows.
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
    """What a strided slice does to each axis.

    Attributes:
        kept: for each axis of the input, its axis in the result; None if it is removed.
        full: the axes of the input of which all elements are taken, in order.
        new: the axes of the result that are new.
        entries: for each axis of the input, its entry in `begin` and `end`; None if it has none.
        ranges: for each axis with an entry, its first and last element, if known.
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
    """Python's slicing."""
    dims, layout = call.dims(0), call.layouts[0]
    if call.has("local") or not all(map(is_plain, call.layouts[1:])) or dims is None:
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
    """Takes the first element of the rows' axis, which belongs to the first row."""
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
    return call.all(SETTLED_SUM, dims=[known], emit=of_the_first_row)


def of_the_first_row(lane: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """A value of the first row of the batch, which one worker has."""
    (value,) = lane.copy(call.op, inputs)
    return [lane.contribution_of_whole(value)]


def _slice_of_repetitions(call: Call, slicing: _Slicing, dims: Any, known: Any) -> Decision | None:
    """Takes some of the repetitions of all rows, as from rows concatenated with others."""
    layout = call.layouts[0]
    entry, new = slicing.entries[layout.axis], slicing.kept[layout.axis]
    if entry is None or new is None or layout.axis not in slicing.ranges or known is None:
        return None
    unit = dims[layout.axis].divided_by(layout.outer)
    first, last = slicing.ranges[layout.axis]
    if unit is None or first is None or last is None:
        return None
    start = Dim(0) if first == Dim(0) else first.divided_by(unit)
    stop = last.divided_by(unit)
    if start is None or stop is None or start.value is None or stop.value is None:
        return None
    count = stop.value - start.value
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
    """Puts a gradient where its elements were taken from, among zeros."""
    shape, layout = call.content(0), call.layouts[4]
    if call.has("local") or not all(map(is_plain, call.layouts[:4])):
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
    """Adds elements around each axis."""
    dims, layout = call.dims(0), call.layouts[0]
    if call.has("local") or not all(map(is_plain, call.layouts[1:])) or dims is None:
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
    """Adds repetitions of rows, as the gradient of a slice of repetitions does."""
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


def pad_repetitions(lane: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Pads with repetitions of own rows."""
    around, axis = inputs[1], call.layouts[0].axis
    own = around[axis] // lane.all_rows(around.dtype) * lane.own_rows(around.dtype)
    local = tf.concat([around[:axis], own[None], around[axis + 1 :]], axis=0)
    return lane.copy(call.op, [inputs[0], local, *inputs[2:]])


def _is_unpadded(call: Call, axis: int) -> bool:
    around = call.content(1)
    if around is None or isinstance(around, Axes):
        return False
    return all(size == Dim(0) for size in around.reshape(-1, 2)[axis])


@rule("MirrorPadGrad")
def mirror_pad_gradient(call: Call) -> Decision | None:
    """The gradient of a mirrored pad."""
    layout, dims = call.layouts[0], call.dims(0)
    if layout.kind != "rows" or dims is None or not _is_unpadded(call, layout.axis):
        return None
    known = [d if _is_unpadded(call, a) else None for a, d in enumerate(dims)]
    return call.all(layout, dims=[merged(call.op.outputs[0], known)])


@rule("ReverseV2", "Roll", "Cumsum", "Cumprod", "CumulativeLogsumexp")
def along_axes(call: Call) -> Decision | None:
    """Acts along some axes, and on each slice of the others by itself."""
    dims, layout = call.dims(0), call.layouts[0]
    axes = call.ints(len(call.values) - 1)
    if call.has("local") or not all(map(is_plain, call.layouts[1:])) or dims is None:
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
    """Reverses the beginning of each row."""
    layout, batch = call.layouts[0], int(call.attr("batch_dim"))
    if layout.kind != "rows" and call.layouts[1].kind != "rows":
        return None
    axis = layout if layout.kind == "rows" else call.layouts[1].moved_to(batch)
    if axis.axis != batch:
        return None
    return Decision([axis, axis.moved_to(0)], [axis], dims=[call.dims(0)])


# Operations on each row: those along which axis it does not matter where they are cut.


def _cut_before(call: Call, last: int, batched: Sequence[int], outputs: Any = None) -> Any:
    """Acts on the last axes of some operands, and on each slice of the others by itself.

    Args:
        call: the call.
        last: the number of those axes.
        batched: the operands that have the other axes.
        outputs: the results with rows; all by default.
    """
    target = _same_rows(call, batched)
    if target is None or call.has("local"):
        return None
    source = next(i for i in batched if call.layouts[i].kind == "rows")
    rank = call.rank(source)
    if rank is None or any(call.rank(i) != rank for i in batched) or target.axis >= rank - last:
        return None
    inputs: list[Layout | None] = []
    for i, layout in enumerate(call.layouts):
        own = call.dims(i)
        if i in batched and own is not None and own[target.axis] != ONE:
            inputs.append(None if layout == target else target)
        else:  # An operand of one row is broadcast.
            inputs.append(None if is_plain(layout) else WHOLE)
    made = [target] * len(call.op.outputs)
    dims = []
    given = call.dims(source)
    assert given is not None
    for output in call.op.outputs:
        known: list[Any] = [None] * (output.shape.rank or 0)
        if output.shape.rank is not None and output.shape.rank > target.axis:
            known[target.axis] = given[target.axis]
            for axis in range(min(rank - last, output.shape.rank)):
                known[axis] = given[axis] if len(batched) == 1 or axis == target.axis else None
            sizes = [call.dims(i) for i in batched]
            same = all(s is not None and s[-1].is_same(given[-1]) for s in sizes)
            if call.type in _KEEPS_SHAPE and len(known) == rank and same:
                known[rank - last :] = given[rank - last :]
        dims.append(merged(output, known) if output.shape.rank is not None else None)
    return Decision(inputs, made, dims=dims)


_BEFORE = {
    **dict.fromkeys(["Softmax", "LogSoftmax"], (1, (0,))),
    **dict.fromkeys(["TopKV2", "TopK", "FFT", "IFFT", "RFFT", "IRFFT"], (1, (0,))),
    **dict.fromkeys(["FFT2D", "IFFT2D", "RFFT2D", "IRFFT2D"], (2, (0,))),
    **dict.fromkeys(["FFT3D", "IFFT3D"], (3, (0,))),
    **dict.fromkeys(["SoftmaxCrossEntropyWithLogits"], (1, (0, 1))),
    **dict.fromkeys(
        names(
            "Cholesky MatrixInverse MatrixDeterminant LogMatrixDeterminant Qr Svd Eig "
            "SelfAdjointEigV2 MatrixSquareRoot MatrixLogarithm MatrixExponential "
            "MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3 MatrixBandPart "
            "BatchMatrixBandPart Lu"
        ),
        (2, (0,)),
    ),
    **dict.fromkeys(
        ["CholeskyGrad", "MatrixSolve", "MatrixTriangularSolve", "MatrixSolveLs"], (2, (0, 1))
    ),
    **dict.fromkeys(["MatrixDiag", "MatrixDiagV2", "MatrixDiagV3"], (1, (0,))),
    **dict.fromkeys(["AdjustHue", "AdjustSaturation", "RGBToHSV", "HSVToRGB"], (1, (0,))),
    "AdjustContrastv2": (3, (0,)),
}


_KEEPS_SHAPE = names(
    "Softmax LogSoftmax SoftmaxCrossEntropyWithLogits FFT IFFT FFT2D IFFT2D FFT3D IFFT3D Cholesky "
    "MatrixInverse MatrixBandPart MatrixExponential MatrixLogarithm MatrixSquareRoot"
)


@rule(*_BEFORE)
def on_last_axes(call: Call) -> Decision | None:
    """Acts on the last axes."""
    last, batched = _BEFORE[call.type]
    if call.type.startswith("MatrixDiagV"):
        rank = call.rank(0)
        if rank is None or call.out_rank() is None:
            return None
        last += rank + 1 - call.out_rank()  # type: ignore[operator] # A band has two axes.
    found: Decision | None = _cut_before(call, last, batched)
    return found


@rule("MatrixSetDiag", "MatrixSetDiagV2", "MatrixSetDiagV3")
def set_diagonal(call: Call) -> Decision | None:
    """Replaces diagonals."""
    target, rank, diagonal = _same_rows(call, (0, 1)), call.rank(0), call.rank(1)
    if target is None or rank is None or diagonal is None or call.has("local"):
        return None
    if target.axis >= min(rank - 2, diagonal - 1):
        return None
    inputs: list[Layout | None] = [None if v == target else target for v in call.layouts[:2]]
    inputs += [None if is_plain(v) else WHOLE for v in call.layouts[2:]]
    return Decision(inputs, [target], dims=[call.dims(0)])


@rule("InTopK", "InTopKV2")
def in_top(call: Call) -> Decision | None:
    """Whether each row's class is among those with the highest scores."""
    target = _same_rows(call, (0, 1))
    if target is None or target.axis != 0 or call.has("local"):
        return None
    inputs: list[Layout | None] = [None if v == target else target for v in call.layouts[:2]]
    inputs += [None if is_plain(v) else WHOLE for v in call.layouts[2:]]
    return Decision(inputs, [target], dims=[call.dims(1)])


@rule("LookupTableFindV2")
def look_up(call: Call) -> Decision | None:
    """Looks up each element in a table."""
    keys, dims = call.layouts[1], call.dims(1)
    if keys.kind != "rows" or dims is None or call.out_rank() != len(dims):
        return None
    inputs = [None, None, None if is_plain(call.layouts[2]) else WHOLE]
    return Decision(inputs, [keys], dims=[dims], emit=with_the_rank_of_keys)


def with_the_rank_of_keys(lane: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Looks up in a table whose copied handle does not know the shapes of its values."""
    results = lane.copy(call.op, inputs)
    results[0].set_shape(inputs[1].shape)
    return results


@rule("SparseSoftmaxCrossEntropyWithLogits")
def sparse_cross_entropy(call: Call) -> Decision | None:
    """The loss of each row, and its gradient."""
    target = _same_rows(call, (0, 1))
    if target is None or target.axis != 0:
        return None
    return Decision([target, target], [target, target], dims=[call.dims(1), call.dims(0)])


@rule("ArgMax", "ArgMin")
def arg(call: Call) -> Decision | None:
    """Where the largest element along an axis is."""
    dims, layout, axis = call.dims(0), call.layouts[0], call.ints(1)
    if dims is None or layout.kind != "rows" or axis is None:
        return None
    at = axis[0] % len(dims)
    if at == layout.axis:
        return None
    new = tuple(d for i, d in enumerate(dims) if i != at)
    return call.all(layout.moved_to(layout.axis - (at < layout.axis)), dims=[new])


@rule("OneHot")
def one_hot(call: Call) -> Decision | None:
    """Encodes integers along a new axis."""
    dims, layout = call.dims(0), call.layouts[0]
    if dims is None or call.has("local") or not all(map(is_plain, call.layouts[1:])):
        return None
    axis = int(call.attr("axis")) % (len(dims) + 1)
    depth = call.content(1)
    size = None if depth is None else depth.item()
    new = merged(call.op.outputs[0], [*dims[:axis], size, *dims[axis:]])
    if layout.kind != "rows":
        return None if layout.kind == "partial" else call.all(WHOLE, dims=[new])
    return call.all(layout.moved_to(layout.axis + (axis <= layout.axis)), dims=[new])


# Operations whose first axis is the batch.

# For each: the operands with the batch, and the operands that are shapes with it.
_LEADING: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    **dict.fromkeys(
        names(
            "Conv2D Conv3D Conv DepthwiseConv2dNative AvgPool AvgPool3D MaxPool MaxPoolV2 "
            "MaxPool3D LRN SpaceToDepth DepthToSpace ResizeBilinear ResizeNearestNeighbor "
            "ResizeBicubic ResizeArea ExtractImagePatches ExtractVolumePatches Dilation2D "
            "MaxPoolWithArgmax"
        ),
        ((0,), ()),
    ),
    **dict.fromkeys(
        names("Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput"),
        ((2,), (0,)),
    ),
    **dict.fromkeys(["AvgPoolGrad", "AvgPool3DGrad"], ((1,), (0,))),
    **dict.fromkeys(
        [
            "MaxPoolGrad",
            "MaxPool3DGrad",
            "MaxPoolGradV2",
            "MaxPoolGradGrad",
            "MaxPool3DGradGrad",
            "LRNGrad",
        ],
        ((0, 1, 2), ()),
    ),
    **dict.fromkeys(["ResizeBilinearGrad", "ResizeBicubicGrad"], ((0, 1), ())),
    "ResizeNearestNeighborGrad": ((0,), ()),
    "ScaleAndTranslate": ((0,), ()),
    "ScaleAndTranslateGrad": ((0, 1), ()),
    "ImageProjectiveTransformV3": ((0,), ()),
    "ImageProjectiveTransformV2": ((0,), ()),
    "DrawBoundingBoxesV2": ((0, 1), ()),
    "CombinedNonMaxSuppression": ((0, 1), ()),
    "GRUBlockCell": ((0, 1), ()),
    "LSTMBlockCell": ((0, 1, 2), ()),
}


@rule(*_LEADING)
def on_each_row(call: Call) -> Decision | None:
    """Acts on each row by itself."""
    batched, shapes = _LEADING[call.type]
    target = _same_rows(call, batched)
    if target is None or target.axis != 0 or call.has("local"):
        return None
    if call.type == "MaxPoolWithArgmax" and call.attr("include_batch_in_index"):
        return None
    inputs: list[Layout | None] = []
    for i, layout in enumerate(call.layouts):
        if i in batched:
            one_for_all = (call.dims(i) or (None,))[0] == ONE and layout.kind == "whole"
            inputs.append(None if layout == target or one_for_all else target)
        else:
            inputs.append(None if is_plain(layout) else WHOLE)
    if call.type.startswith("ImageProjectiveTransform"):
        inputs[1] = _transforms(call, target)
    source = next(i for i in batched if call.layouts[i] == target)
    given = call.dims(source)
    if given is None:
        return None
    dims = []
    for output in call.op.outputs:
        known: list[Any] = [None] * (output.shape.rank or 0)
        if known:
            known[0] = given[0]
        dims.append(merged(output, known) if known else None)
    return Decision(
        inputs,
        [target] * len(call.op.outputs),
        dims=dims,
        local_shapes=dict.fromkeys(shapes, 0),
    )


def _transforms(call: Call, target: Layout) -> Layout | None:
    """One transform for all images, or one for each."""
    dims = call.dims(1)
    if dims is not None and dims[0] == ONE:
        return None if is_plain(call.layouts[1]) else WHOLE
    return None if call.layouts[1] == target else target


_FILTER_GRADIENTS = {
    **dict.fromkeys(
        names("Conv2DBackpropFilter Conv3DBackpropFilterV2 DepthwiseConv2dNativeBackpropFilter"),
        (0, 2),
    ),
    "Dilation2DBackpropFilter": (0, 2),
}


@rule(*_FILTER_GRADIENTS)
def filter_gradient(call: Call) -> Decision | None:
    """The gradient of filters: a sum over the rows."""
    first, second = _FILTER_GRADIENTS[call.type]
    target = _same_rows(call, (first, second))
    if target is None or target.axis != 0:
        return None
    inputs: list[Layout | None] = [None if is_plain(v) else WHOLE for v in call.layouts]
    for i in (first, second):
        inputs[i] = None if call.layouts[i] == target else target
    return Decision(inputs, [PARTIAL_SUM])


@rule("Dilation2DBackpropInput")
def dilation_gradient(call: Call) -> Decision | None:
    """The gradient of images."""
    target = _same_rows(call, (0, 2))
    if target is None or target.axis != 0:
        return None
    inputs = [None if v == target else target for v in call.layouts]
    inputs[1] = None if is_plain(call.layouts[1]) else WHOLE
    return Decision(inputs, [target], dims=[call.dims(0)])


@rule("SpaceToBatchND", "BatchToSpaceND")
def between_space_and_batch(call: Call) -> Decision | None:
    """Moves blocks between space and batch, as around dilated convolutions."""
    dims, layout, block = call.dims(0), call.layouts[0], call.ints(1)
    if dims is None or layout.kind != "rows" or layout.axis != 0 or block is None:
        return None
    if not all(map(is_plain, call.layouts[1:])):
        return None
    size = product(map(Dim, block))
    leaves = call.type == "SpaceToBatchND"
    outer = layout.outer * size if leaves else layout.outer.divided_by(size)
    first = dims[0] * size if leaves else dims[0].divided_by(size)
    if outer is None or first is None:
        return None
    known = [first, *[None] * len(block), *dims[1 + len(block) :]]
    return call.all(rows(0, outer, layout.inner), dims=[merged(call.op.outputs[0], known)])


@rule("BiasAdd")
def bias_add(call: Call) -> Decision | None:
    """Adds to each channel."""
    layout = call.layouts[0]
    if layout.kind != "rows" or call.layouts[1].kind != "whole":
        return None
    rank = call.rank(0) or 0
    channels = 1 if call.attr("data_format") == b"NCHW" else rank - 1
    return call.all(layout, dims=[call.dims(0)]) if layout.axis != channels else None


@rule("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
def fused_batch_normalization(call: Call) -> Decision | None:
    """Normalizes with given statistics; statistics of the batch couple its rows."""
    layout = call.layouts[0]
    if call.attr("is_training") or layout.kind != "rows" or layout.axis != 0:
        return None
    if not all(v.kind == "whole" for v in call.layouts[1:]):
        return None
    outputs = [layout, *[WHOLE] * (len(call.op.outputs) - 1)]
    dims = [call.dims(0), *[dims_of(t) for t in call.op.outputs[1:]]]
    return Decision([None] * 5, outputs, dims=dims)


@rule("FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3")
def fused_batch_normalization_gradient(call: Call) -> Decision | None:
    """The gradients with given statistics."""
    target = _same_rows(call, (0, 1))
    if call.attr("is_training") or target is None or target.axis != 0:
        return None
    if not all(v.kind == "whole" for v in call.layouts[2:]):
        return None
    inputs = [None if v == target else target for v in call.layouts[:2]]
    outputs = [target, PARTIAL_SUM, PARTIAL_SUM, WHOLE, WHOLE]
    dims = [call.dims(0), *[dims_of(t) for t in call.op.outputs[1:]]]
    return Decision([*inputs, *[None] * (len(call.values) - 2)], outputs, dims=dims)


# Contractions.


@rule("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def matmul(call: Call) -> Decision | None:
    """Products of matrices."""
    left, right = call.dims(0), call.dims(1)
    if left is None or right is None or call.has("local"):
        return None
    plain = call.type == "MatMul"
    first = bool(call.attr("transpose_a" if plain else "adj_x"))
    second = bool(call.attr("transpose_b" if plain else "adj_y"))
    rank = max(len(left), len(right))
    batch = list(range(rank - 2))

    def labels(dims: Any, pair: Sequence[str]) -> list[Any]:
        lead = batch[len(batch) - (len(dims) - 2) :]
        used: list[Any] = [None if dims[k] == ONE else label for k, label in enumerate(lead)]
        return [*used, *pair]

    one = labels(left, ("k", "i") if first else ("i", "k"))
    other = labels(right, ("j", "k") if second else ("k", "j"))
    return contraction(call, [one, other], [*batch, "i", "j"])


@rule("Einsum")
def einsum(call: Call) -> Decision | None:
    """Any contraction."""
    equation = call.attr("equation").decode().replace(" ", "")
    given, _, result = equation.partition("->")
    terms = given.split(",")
    ranks = [call.rank(i) for i in range(len(terms))]
    if None in ranks or call.has("local"):
        return None
    missing = [
        rank - (len(term) - 3) if "..." in term else 0  # type: ignore[operator]
        for term, rank in zip(terms, ranks, strict=True)
    ]
    most = max([0, *missing])

    def labels(term: str, count: int, dims: Any = None) -> list[Any]:
        if "..." not in term:
            return list(term)
        before, _, after = term.partition("...")
        middle: list[Any] = list(range(most - count, most))
        if dims is not None:
            middle = [
                None if dims[len(before) + k] == ONE else label for k, label in enumerate(middle)
            ]
        return [*before, *middle, *after]

    inputs = [
        labels(term, count, call.dims(i))
        for i, (term, count) in enumerate(zip(terms, missing, strict=True))
    ]
    out = labels(result, most)
    if any(len(set(term)) != len(term) for t in terms for term in [t.replace("...", "")]):
        return None if call.has("rows") else call.all(WHOLE)
    return contraction(call, inputs, out)


def contraction(
    call: Call, labels: Sequence[Sequence[Any]], out: Sequence[Any]
) -> Decision | None:
    """A contraction, given a label for each axis; None for an axis that is broadcast."""
    dims: list[Any] = []
    for label in out:
        found = None
        for i, own in enumerate(labels):
            if label in own:
                found = call.dims(i)[own.index(label)]  # type: ignore[index]
                break
        dims.append(found if found is not None else ONE)
    known = [merged(call.op.outputs[0], dims)] if call.out_rank() in (None, len(dims)) else None
    if call.has("partial") and not call.has("rows"):
        parts = [v for v in call.layouts if v.kind == "partial"]
        if len(parts) == 1 and parts[0].is_sum:
            return call.all(parts[0], dims=known)
        return None
    # Contracted rows are preferred: a sum is cheaper than gathered rows.
    candidates = [
        (label is None or label in out, i, label)
        for i, layout in enumerate(call.layouts)
        if layout.kind == "rows"
        for label in [labels[i][layout.axis]]
    ]
    if not candidates:
        return call.all(WHOLE, dims=known)
    shared = [c for c in candidates if sum(c[2] in own for own in labels) > 1 and c[2] is not None]
    both = [
        c
        for c in shared
        if not c[0]
        and all(
            call.layouts[i].kind == "rows" and labels[i][call.layouts[i].axis] == c[2]
            for i in range(len(labels))
        )
    ]
    labeled = both or [c for c in candidates if c[2] is not None]
    if not labeled:
        return None
    _, source, label = labeled[0]
    target = call.layouts[source]
    inputs: list[Layout | None] = []
    for i, layout in enumerate(call.layouts):
        if label in labels[i]:
            wanted = target.moved_to(list(labels[i]).index(label))
            inputs.append(None if layout == wanted else wanted)
        else:
            inputs.append(None if is_plain(layout) else WHOLE)
    reason = ""
    if len(candidates) > 1 and any(v is WHOLE for v in inputs):
        reason = "pairs of rows"
    row = call.dims(source)[target.axis]  # type: ignore[index]
    if label in out:
        at = list(out).index(label)
        if known is not None:
            changed = list(known[0])
            changed[at] = row
            known = [tuple(changed)]
        return Decision(inputs, [target.moved_to(at)], dims=known, reason=reason)
    return Decision(inputs, [PARTIAL_SUM], dims=known, reason=reason)


# Looking up.


@rule("GatherV2")
def gather(call: Call) -> Decision | None:
    """Takes slices along an axis."""
    params, indices = call.layouts[0], call.layouts[1]
    axis, rank, index_rank = call.ints(2), call.rank(0), call.rank(1)
    if axis is None or rank is None or index_rank is None or call.has("local"):
        return None
    at, batch = axis[0] % rank, int(call.attr("batch_dims"))
    given, wanted = call.dims(0), call.dims(1)
    assert given is not None and wanted is not None
    out = [*given[:at], *wanted[batch:], *given[at + 1 :]]
    dims = [merged(call.op.outputs[0], out)] if call.out_rank() in (None, len(out)) else None
    if params.is_sum and is_plain(indices):
        return call.all(params, dims=dims)
    if is_plain(params) and is_plain(indices):
        return call.all(WHOLE, dims=dims)
    if params.kind == "rows" and params.axis < batch:
        other = params if indices != params else None
        return Decision([None, other, None], [params], dims=dims)
    if indices.kind == "rows" and indices.axis < batch:
        return Decision([indices, None, None], [indices], dims=dims)
    if indices.kind == "rows":
        inputs = [None if is_plain(params) else WHOLE, None, None]
        moved = at + indices.axis - batch
        return Decision(inputs, [indices.moved_to(moved)], dims=dims)
    if params.kind == "rows" and params.axis != at and is_plain(indices):
        moved = params.axis if params.axis < at else params.axis - 1 + index_rank - batch
        return call.all(params.moved_to(moved), dims=dims)
    return None


@rule("GatherNd")
def gather_nd(call: Call) -> Decision | None:
    """Takes elements or slices at several indices."""
    params, indices, rank = call.layouts[0], call.layouts[1], call.rank(1)
    if rank is None or call.has("local"):
        return None
    if indices.kind == "rows" and indices.axis < rank - 1:
        wanted, given = call.dims(1), call.dims(0)
        assert wanted is not None
        count, dims = wanted[-1].value, None
        if given is not None and count is not None:
            dims = [merged(call.op.outputs[0], [*wanted[:-1], *given[count:]])]
        return Decision([None if is_plain(params) else WHOLE, None], [indices], dims=dims)
    if not is_plain(indices) or params.kind == "partial":
        return call.all(params) if params.is_sum and is_plain(indices) else None
    places, given = call.dims(1), call.dims(0)
    depth = None if places is None else places[-1].value
    if params.kind != "rows" or given is None or depth is None or params.axis < depth:
        return None
    assert places is not None
    known = [*places[:-1], *given[depth:]]
    layout = params.moved_to(params.axis - depth + rank - 1)
    return call.all(layout, dims=[merged(call.op.outputs[0], known)])


@rule("ResourceGather")
def resource_gather(call: Call) -> Decision | None:
    """Looks up slices of a variable."""
    variable, indices = call.layouts
    if variable.kind == "local":
        return None
    if variable.kind == "partial":
        return Decision([None, None if is_plain(indices) else WHOLE], [variable])
    if indices.kind != "rows":
        return call.all(WHOLE) if is_plain(indices) else None
    wanted = call.dims(1)
    batch = int(call.attr("batch_dims"))
    if batch:
        return None
    dims = None
    if wanted is not None and call.out_rank() is not None:
        known = [*wanted, *[None] * (call.out_rank() - len(wanted))]  # type: ignore[operator]
        dims = [merged(call.op.outputs[0], known)]
    return call.all(indices, dims=dims)


_SEGMENTS = {
    "UnsortedSegmentSum": "sum",
    "UnsortedSegmentMax": "max",
    "UnsortedSegmentMin": "min",
    "UnsortedSegmentProd": "product",
}


@rule(*_SEGMENTS)
def unsorted_segment(call: Call) -> Decision | None:
    """Reduces slices with the same number."""
    data, ids, count = call.layouts
    rank = call.rank(1)
    if rank is None or not is_plain(count) or call.has("local"):
        return None
    target, given, size = _same_rows(call, (0, 1)), call.dims(0), call.content(2)
    how = _SEGMENTS[call.type]
    dims = None
    if given is not None:
        first = None if size is None else size.item()
        dims = [merged(call.op.outputs[0], [first, *given[rank:]])]
    if target is None:
        linear = data.is_sum and how == "sum" and is_plain(ids)
        return call.all(data, dims=dims) if linear else None
    if target.axis >= rank:
        if not is_plain(ids):
            return None
        return call.all(data.moved_to(data.axis - rank + 1), dims=dims)
    inputs = [None if v == target else target for v in (data, ids)]
    return Decision([*inputs, None], [partial(how)], dims=dims)


@rule("ScatterNd")
def scatter_nd(call: Call) -> Decision | None:
    """Adds slices into zeros."""
    indices, updates, shape = call.layouts
    rank = call.rank(0)
    if rank is None or not is_plain(shape) or call.has("local"):
        return None
    target = _same_rows(call, (0, 1))
    if target is None:
        return call.all(updates) if updates.is_sum and is_plain(indices) else None
    if target.axis >= rank - 1:
        return None
    inputs = [None if v == target else target for v in (indices, updates)]
    return Decision([*inputs, None], [PARTIAL_SUM])


_SCATTERS = names(
    "TensorScatterUpdate TensorScatterAdd TensorScatterSub TensorScatterMax TensorScatterMin"
)


@rule(*_SCATTERS)
def tensor_scatter(call: Call) -> Decision | None:
    """Combines slices of a tensor with others."""
    tensor, indices, updates = call.layouts
    dims, places, rank = call.dims(0), call.dims(1), call.rank(2)
    if dims is None or places is None or rank is None or call.has("local"):
        return None
    depth = places[-1].value
    if depth is None:
        return None
    known = [dims]
    if not call.has("rows"):
        if (
            call.type == "TensorScatterAdd"
            and is_plain(indices)
            and tensor.is_sum
            and updates.is_sum
        ):
            inputs, result = _sums([tensor, updates])
            return Decision([inputs[0], None, inputs[1]], [result], dims=known)
        return None if call.has("partial") else call.all(WHOLE, dims=known)
    if indices.kind == "rows":
        if call.type != "TensorScatterAdd" or indices.axis >= len(places) - 1:
            return None
        # Own rows are added by each worker, the tensor itself by one of them.
        return Decision(
            [
                None if tensor == SETTLED_SUM else SETTLED_SUM,
                None,
                None if updates == indices else indices,
            ],
            [PARTIAL_SUM],
            dims=known,
        )
    if not is_plain(indices):
        return None
    # Rows in slices: of all operands alike.
    shift = len(places) - 1 - depth
    axis = tensor.axis if tensor.kind == "rows" else updates.axis - shift
    layout = (tensor if tensor.kind == "rows" else updates).moved_to(axis)
    if axis < depth:
        return None
    wanted = layout.moved_to(axis + shift)
    inputs = [None if tensor == layout else layout, None, None if updates == wanted else wanted]
    return Decision(inputs, [layout], dims=known)


@rule("DenseBincount")
def dense_bincount(call: Call) -> Decision | None:
    """Counts integers: in each row, or in all of them."""
    layout = call.layouts[0]
    weights = call.dims(2)
    if layout.kind != "rows" or layout.axis != 0 or not is_plain(call.layouts[1]):
        return None
    has_weights = weights is not None and weights[0].value != 0
    inputs: list[Layout | None] = [None, None, None]
    if has_weights:
        inputs[2] = None if call.layouts[2] == layout else layout
    if call.rank(0) == 2:
        size = call.content(1)
        known = [call.dims(0)[0], None if size is None else size.item()]  # type: ignore[index]
        return Decision(inputs, [layout], dims=[merged(call.op.outputs[0], known)])
    if call.attr("binary_output"):
        return None
    return Decision(inputs, [PARTIAL_SUM])


# Random numbers.

_RANDOM = names(
    "StatelessRandomUniformV2 StatelessRandomNormalV2 StatelessRandomUniformIntV2 "
    "StatelessRandomUniformFullIntV2"
)


@rule(*_RANDOM)
def random_numbers(call: Call) -> Decision | None:
    """Draws numbers: a row's from the place in the stream where they are for the whole batch."""
    shape = call.content(0)
    if not all(map(is_plain, call.layouts)) or shape is None or shape.ndim != 1:
        return None
    dims = merged(call.op.outputs[0], list(shape))
    algorithm = tf.get_static_value(call.op.inputs[3])
    unit = Dim(1, (call.batch,))
    if algorithm in _PHILOX and len(dims) and dims[0].has(call.batch):
        inner = dims[0].divided_by(unit)
        if inner is not None and not any(d.has(call.batch) for d in dims[1:]):
            result = rows(0, inner=inner)
            return call.all(result, dims=[dims], local_shapes={0: 0}, emit=skip_ahead)
    return call.all(WHOLE, dims=[dims])


# Philox, and the best algorithm of a device, which is Philox on CPUs and GPUs.
_PHILOX = (1, 3)
# Each increment of the counter of Philox yields 128 bits: four numbers of 32, or two of 64 bits.
_PER_COUNT = {tf.float64: 2, tf.int64: 2, tf.uint64: 2}


def skip_ahead(lane: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Draws own rows' numbers, by random access to the stream (Salmon et al., 2011)."""
    shape, key, counter, *rest = inputs
    dtype = call.op.outputs[0].dtype
    count = tf.reduce_prod(tf.cast(shape, tf.int64))
    skipped = lane.first_row(tf.int64) * (count // lane.own_rows(tf.int64))
    block = _PER_COUNT.get(dtype, 4)
    counter += tf.cast(tf.stack([skipped // block, 0]), tf.uint64)
    # A few more than needed: for XLA, how many are drawn may not depend on where.
    long = tf.reshape(tf.cast(count + block - 1, shape.dtype), [1])
    (numbers,) = lane.copy(call.op, [long, key, counter, *rest])
    own = tf.slice(numbers, [skipped % block], [count])
    return [tf.reshape(own, shape)]


_STATEFUL_RANDOM = names(
    "RandomUniform RandomStandardNormal RandomUniformInt TruncatedNormal RandomShuffle Multinomial "
    "RandomGamma RandomPoissonV2"
)


@rule(*_STATEFUL_RANDOM)
def stateful_random_numbers(call: Call) -> Decision | None:
    """Draws whole tensors on all workers, whose generators have the same seeds."""
    if call.attr("seed") or call.attr("seed2"):
        return None
    decision = call.whole("numbers are drawn for the whole batch")
    decision.outputs = [SETTLED_SUM] * len(call.op.outputs)
    decision.emit = by_the_first
    return decision


def by_the_first(lane: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Numbers without a seed: those of one worker count."""
    return [lane.contribution_of_whole(x) for x in lane.copy(call.op, inputs)]


# Variables.


@rule("ReadVariableOp")
def read_variable(call: Call) -> Decision | None:
    """Reads a variable, which is held as it was declared."""
    return call.all(call.layouts[0])


@rule("VarIsInitializedOp", "VariableShape", "DisableCopyOnRead")
def about_variable(call: Call) -> Decision | None:
    """Asks something about a variable, or changes nothing of its value."""
    return call.all(WHOLE)


@rule("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
def assign_variable(call: Call) -> Decision | None:
    """Writes a variable."""
    variable, value = call.layouts
    if variable.kind == "local":
        return call.all(LOCAL)
    if variable.kind == "partial":
        return Decision([None, None if value == variable else variable], [])
    return Decision([None, None if is_plain(value) else WHOLE], [])


@rule("ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterNdAdd", "ResourceScatterNdSub")
def scatter_add_variable(call: Call) -> Decision | None:
    """Adds to elements of a variable."""
    variable, indices, updates = call.layouts
    if variable.kind != "partial":
        return None
    # The first axes of indices and updates are the same.
    are_rows = updates.kind == "rows" and updates.axis == 0
    are_rows = are_rows and (is_plain(indices) or indices == updates)
    if are_rows and (call.rank(1) or 0) > ("Nd" in call.type):
        inputs = [None, None if indices == updates else updates, None]
        return Decision(inputs, [], emit=scatter_of_own_rows)
    return Decision([None, None if is_plain(indices) else WHOLE, SETTLED_SUM], [])


def scatter_of_own_rows(lane: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Adds own rows to this worker's part of a variable."""
    variable, indices, updates = inputs
    return lane.copy(call.op, [variable, indices, lane.settled(updates)])


@rule("ResourceScatterUpdate", "ResourceScatterNdUpdate")
def scatter_variable(call: Call) -> Decision | None:
    """Sets elements of a variable."""
    if call.layouts[0].kind != "partial":
        return None
    return Decision([None, None if is_plain(call.layouts[1]) else WHOLE, SETTLED_SUM], [])


@rule("ResourceScatterMul", "ResourceScatterDiv")
def scale_variable(call: Call) -> Decision | None:
    """Multiplies elements of a variable."""
    if call.layouts[0].kind != "partial":
        return None
    return Decision([None, *(None if is_plain(v) else WHOLE for v in call.layouts[1:])], [])


# Collectives of the traced program, such as those of an optimizer.


@rule(
    "TfdistAllReduce",
    "TfdistCompressedAllReduce",
    "TfdistReduceScatter",
    "CollectiveReduceV2",
    "CollectiveReduceV3",
)
def all_reduce(call: Call) -> Decision | None:
    """Sums partial values, or values of each worker's own, over all workers or some of them."""
    local = call.type == "TfdistReduceScatter" or any(
        call.layouts[i].kind == "local" for i in _reduced_operands(call)
    )
    result = LOCAL if local else WHOLE
    inputs: list[Layout | None] = [None] * len(call.layouts)
    for i in _reduced_operands(call):
        inputs[i] = None if call.layouts[i].kind == "local" else SETTLED_SUM
    return Decision(inputs, [result] * len(call.op.outputs))


def _reduced_operands(call: Call) -> list[int]:
    """The operands of a collective that are values, rather than tokens, keys or seeds."""
    if call.type.startswith("Collective"):
        return [0]
    dtypes = [tensor.dtype for tensor in call.op.inputs]
    if call.type == "TfdistCompressedAllReduce":
        return [i for i, dtype in enumerate(dtypes) if dtype.is_floating]
    return [i for i, dtype in enumerate(dtypes) if dtype != tf.resource]


@rule("IdentityN")
def identities(call: Call) -> Decision | None:
    """Passes values on, or marks them as what a worker contributes to sums, or as the sums."""
    if EQUAL in call.op.node_def.attr:
        inputs = [None if is_plain(v) or v.kind == "local" else WHOLE for v in call.layouts]
        return Decision(inputs, [WHOLE] * len(inputs), emit=as_they_are)
    if CONTRIBUTION in call.op.node_def.attr:
        inputs = [None if v.kind == "local" or v.is_sum else SETTLED_SUM for v in call.layouts]
        return Decision(inputs, [LOCAL] * len(inputs), emit=contribute)
    return Decision(
        [None] * len(call.values), call.layouts, values=call.values, emit=each_by_itself
    )


def as_they_are(lane: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Passes on values, each as soon as it is available."""
    return list(inputs)


def contribute(lane: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Passes on what this worker contributes to sums: nothing if it has no rows."""
    results = list(inputs)
    which = [i for i, v in enumerate(call.layouts) if v.is_sum and not v.settled]
    for i, value in zip(which, lane.all_settled([inputs[i] for i in which]), strict=True):
        results[i] = value
    return results


def each_by_itself(lane: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Passes on values, whose gradients have been computed."""
    return [tf.identity(x) for x in inputs]


@rule("TfdistAllGather", "CollectiveGatherV2")
def all_gather(call: Call) -> Decision | None:
    """Joins the parts of all workers along the first axis."""
    (index,) = _reduced_operands(call)
    if call.layouts[index].kind == "local":
        return call.all(LOCAL)
    inputs: list[Layout | None] = [None] * len(call.layouts)
    inputs[index] = None if is_plain(call.layouts[index]) else WHOLE
    return Decision(inputs, [WHOLE], emit=pass_on)


def pass_on(lane: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """The operand that is to be gathered, which is whole."""
    return [inputs[0] if call.op.type.startswith("Collective") else inputs[-1]]


@rule("TfdistAwait")
def await_launched(call: Call) -> Decision | None:
    """Waits for collectives."""
    return call.all(LOCAL if call.has("local") else WHOLE)


@rule(
    "TfdistReady",
    "TfdistSpan",
    "TfdistInput",
    "TfdistStep",
    "TfdistKeep",
    "TfdistPrepares",
    "TfdistConfirms",
)
def mark(call: Call) -> Decision | None:
    """Marks a point of the step."""
    return call.all(WHOLE)


@rule("TfdistUpdateBegins")
def update_begins(call: Call) -> Decision | None:
    """Marks the point behind which nothing is communicated."""
    return call.all(WHOLE)


@rule("TfdistGroupShape")
def group_shape(call: Call) -> Decision | None:
    """This worker's rank, and the number of workers."""
    return call.all(LOCAL)


# Effects.


@rule("Assert")
def assertion(call: Call) -> Decision | None:
    """Fails on a worker whose rows violate it."""
    condition = call.layouts[0]
    if condition.kind == "whole":
        return Decision([None] * len(call.values), [])
    if condition.how == "all":
        return Decision([None] * len(call.values), [], emit=assert_of_own_rows)
    return None


def assert_of_own_rows(lane: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Asserts what holds for own rows, if there are any."""
    return lane.copy(call.op, [lane.settled(inputs[0], "all"), *inputs[1:]])


@rule("NoOp", "Const", "VarHandleOp", "ControlTrigger", "LoopCond")
def nothing(call: Call) -> Decision | None:
    """Takes no operands."""
    return call.all(WHOLE)


@rule(
    *names(
        "Print PrintV2 WriteAudioSummary WriteGraphSummary WriteHistogramSummary WriteImageSummary "
        "WriteRawProtoSummary WriteScalarSummary WriteSummary"
    )
)
def print_once(call: Call) -> Decision | None:
    """Prints or writes on one worker."""
    decision = call.whole("printed")
    decision.emit = on_the_first_worker
    return decision


def on_the_first_worker(lane: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Runs an operation with an effect on the first worker alone."""
    if call.op.outputs:
        return lane.copy(call.op, inputs)

    def run() -> tf.Tensor:
        lane.copy(call.op, inputs)
        return tf.constant(0)

    lane.effects = [tf.cond(lane.is_first(), run, lambda: tf.constant(0)).op]
    return []


# Functions.


@rule("PartitionedCall", "StatefulPartitionedCall", "RemoteCall")
def function_call(call: Call) -> Decision | None:
    """Calls a function, whose operations are partitioned in its place."""
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


def inline(lane: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Adds the operations of a function in its place."""
    (part,) = call.decision.parts
    wanted = [
        inner.layout if inner.layout.kind == outer.kind else outer
        for inner, outer in zip(part.outputs, call.decision.outputs, strict=True)
    ]
    return lane.inline(part, inputs, wanted)


@rule("If", "StatelessIf", "Case", "StatelessCase")
def conditional(call: Call) -> Decision | None:
    """Chooses a function by a condition that is the same on all workers."""
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
    inputs: list[Layout | None] = [None if is_plain(first) or first.kind == "local" else WHOLE]
    inputs += [None] * (len(call.values) - 1)
    return Decision(inputs, [v.layout for v in values], values=values, parts=parts, emit=branch)


def _joined_branches(values: Sequence[Value], tensor: Any) -> Value:
    result = values[0]
    for value in values[1:]:
        result = joined_values(result, value, tensor)
    around = (*result.layout.outer.symbols, *result.layout.inner.symbols)
    if any(symbol.source is tensor for symbol in around):
        # A branch does not know the sizes of results.
        return dataclasses.replace(result, layout=WHOLE)
    return result


def branch(lane: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Adds a conditional whose branches are partitioned."""
    return lane.branch(call, inputs)


_ROUNDS = 8


@rule("While", "StatelessWhile")
def loop(call: Call) -> Decision | None:
    """Repeats a function; the layouts of its variables are those of a fixed point."""
    body = call.attr("body").name
    values = list(call.values)
    part = call.analysis.part(call.op, body, values)
    gathered: set[int] = set()
    # A list cannot be converted: its layout follows when those of its elements are found.
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
        values = [_unsettled(part, i, before) for i, before in enumerate(values)]
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


def _loop_value(part: Analysis, i: int, before: Value, gathered: set[int]) -> Value:
    """What is known of a loop's variable at the beginning of each round, given one more round.

    Args:
        part: the analysis of a round.
        i: the number of the variable.
        before: what was known of it at the beginning of that round.
        gathered: the variables whose layouts differ from round to round; one may be added.
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
    """A value in which a size that has changed once is unknown from then on."""
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
    """What is known at the beginning of a round of a result of the one before."""

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


def _unsettled(part: Analysis, i: int, before: Value) -> Value:
    """What is known of a loop's variable if no fixed point has been found."""
    tensor = part.graph.inputs[i]
    if part.graph.outputs[i] is tensor:
        return before
    if tensor.dtype == tf.variant:
        return Value(before.layout)
    return Value(WHOLE, dims_of(tensor))


def repeat(lane: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Adds a loop whose functions are partitioned."""
    return lane.repeat(call, inputs)


# Lists of tensors. The layout of a list is that of its elements, and so is that of an optional
# value. Elements that are partial sums are settled.


@rule("TensorListReserve", "EmptyTensorList")
def new_list(call: Call) -> Decision | None:
    """Makes a list without elements."""
    inputs = [None if is_plain(v) else WHOLE for v in call.layouts]
    element = Value(UNSET, _shape_of_elements(call.content(0), call.op.outputs[0]))
    return Decision(inputs, [UNSET], values=[_list_of(UNSET, element)], emit=any_shape_at(0))


def any_shape_at(where: int) -> Callable[..., Any]:
    """Adds an operation on a list, with an unknown shape of its elements, which may be own rows."""

    def add(lane: Any, call: Any, inputs: Sequence[Any]) -> Any:
        changed = list(inputs)
        changed[where] = tf.constant(-1, changed[where].dtype)
        return lane.copy(call.op, changed)

    return add


def _list_of(layout: Layout, element: Value | None) -> Value:
    """A list, given what its elements have in common."""
    if element is not None:
        element = dataclasses.replace(element, layout=layout)
    return Value(layout, None, element)


def _shape_of_elements(shape: Any, tensor: Any) -> tuple[Dim, ...] | None:
    """The dimensions that a shape names, with a symbol for each that is unknown."""
    if shape is None or isinstance(shape, Axes) or shape.ndim != 1:
        return None
    return tuple(
        Dim(1, (Symbol(tensor, axis),)) if dim is None or dim.value == -1 else dim
        for axis, dim in enumerate(shape)
    )


def _without_content(element: Any) -> Value | None:
    """Of elements that may not have been written, or have been changed: their dimensions."""
    if not isinstance(element, Value):
        return None
    content = element.content if isinstance(element.content, Value) else None
    return Value(element.layout, element.dims, content)


@rule("TensorListFromTensor")
def list_from_tensor(call: Call) -> Decision | None:
    """Takes a tensor apart along its first axis."""
    layout, dims = call.layouts[0], call.dims(0)
    inputs: list[Layout | None] = [None, None if is_plain(call.layouts[1]) else WHOLE]
    if call.has("local"):
        return None
    if layout.kind == "rows":
        if layout.axis == 0 or dims is None:
            inputs[0], layout = WHOLE, WHOLE
        else:
            layout = layout.moved_to(layout.axis - 1)
    elif layout.kind == "partial":
        layout = SETTLED_SUM if layout.is_sum else WHOLE
        inputs[0] = None if call.layouts[0] == layout else layout
    element = Value(layout, None if dims is None else dims[1:])
    emit = any_shape_at(1) if layout.kind == "rows" else None
    return Decision(inputs, [layout], values=[_list_of(layout, element)], emit=emit)


def _element(call: Call, at: int, shape_at: int, output: int) -> Decision | None:
    """Takes an element, or all elements, of a list."""
    layout, element = call.layouts[at], call.content(at)
    if call.has("local"):
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
        None if i == at or is_plain(v) else WHOLE for i, v in enumerate(call.layouts)
    ]
    values = [value]
    if len(call.op.outputs) > 1:
        rest = _list_of(layout, element)
        values = [rest, value] if output == 1 else [value, rest]
    emit = element_of_shape(shape_at, output, made, dims, call.batch, stacked)
    return Decision(inputs, [v.layout for v in values], values=values, emit=emit)


def _is_of_list(dim: Dim) -> bool:
    """Whether a size is that of the elements of a list, which may differ."""
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
    """What is known of the elements of an element of a list."""
    if not isinstance(element, Value):
        return None
    return element.content


def element_of_shape(
    where: int, output: int, layout: Layout, dims: Any, batch: Symbol, stacked: bool
) -> Callable[..., Any]:
    """Adds an operation that takes an element of a list, of own rows perhaps.

    Args:
        where: the operand that is the shape of the element.
        output: the result that is the element.
        layout: the element's layout.
        dims: its dimensions, if known.
        batch: the number of rows.
        stacked: whether the result is all elements, along a new axis.
    """

    def size(lane: Any, axis: int, dim: Dim, dtype: Any) -> Any:
        if layout.kind == "rows" and axis == layout.axis:
            rest = (layout.outer * layout.inner).value
            return -1 if rest is None else lane.own_rows(dtype, rest)
        if dim == Dim(1, (batch,)):
            return lane.all_rows(dtype)
        return -1 if dim.value is None else dim.value

    def add(lane: Any, call: Any, inputs: Sequence[Any]) -> Any:
        changed = list(inputs)
        dtype = changed[where].dtype
        if dims is not None:
            sizes = [size(lane, axis, dim, dtype) for axis, dim in enumerate(dims)]
            changed[where] = (
                tf.stack([tf.cast(n, dtype) for n in sizes]) if sizes else (tf.zeros([0], dtype))
            )
        elif layout.kind == "rows":
            changed[where] = tf.constant(-1, dtype)
        results = list(lane.copy(call.op, changed))
        tensor = call.op.outputs[output]
        if layout.kind == "rows" and tensor.dtype != tf.variant and tensor.shape.rank is not None:
            shape = tensor.shape.as_list()
            shape[layout.axis + stacked] = None
            results[output] = tf.ensure_shape(results[output], shape)
        return results

    return add


@rule("TensorListStack", "TensorListGather")
def list_stack(call: Call) -> Decision | None:
    """Joins the elements of a list, or some of them, along a new first axis."""
    return _element(call, 0, 1 if call.type == "TensorListStack" else 2, 0)


@rule("TensorListGetItem")
def list_get_item(call: Call) -> Decision | None:
    """An element of a list."""
    return _element(call, 0, 2, 0)


@rule("TensorListPopBack")
def list_pop(call: Call) -> Decision | None:
    """The last element of a list, and the list without it."""
    return _element(call, 0, 1, 1)


@rule("TensorListSetItem")
def list_set_item(call: Call) -> Decision | None:
    """A list with another element."""
    return _with_element(call, 2)


@rule("TensorListPushBack")
def list_push(call: Call) -> Decision | None:
    """A list with one more element."""
    return _with_element(call, 1)


def _with_element(call: Call, item: int) -> Decision | None:
    held, given = call.values[0], call.values[item]
    if call.has("local"):
        return None
    if held.layout.kind == "unset":
        layout = given.layout
        if layout.kind == "partial":
            layout = SETTLED_SUM if layout.is_sum else WHOLE
    else:
        layout = held.layout  # A list cannot be converted, but its elements can.
    inputs: list[Layout | None] = [
        None if is_plain(v) or i == 0 else WHOLE for i, v in enumerate(call.layouts)
    ]
    inputs[item] = None if given.layout == layout else layout
    element = dataclasses.replace(given, layout=layout)
    known = held.content if isinstance(held.content, Value) else None
    if layout.kind == "rows" and given.layout != layout:
        dims = None if known is None else known.dims
        if (
            dims is None
            or given.dims is None
            or not dims[layout.axis].is_same(given.dims[layout.axis])
        ):
            inputs[0] = WHOLE  # The error names the list.
    if held.layout.kind != "unset" and known is not None:
        element = joined_values(known, element, call.op.outputs[0])
    elif held.layout.kind != "unset":
        element = Value(layout)
    kept = element if call.type == "TensorListPushBack" else _without_content(element)
    return Decision(inputs, [layout], values=[_list_of(layout, kept)])


@rule("TensorListLength", "TensorListElementShape")
def about_list(call: Call) -> Decision | None:
    """The number of elements of a list, or their shape."""
    if call.type == "TensorListLength" or call.has("local"):
        return Decision([None], [WHOLE])
    element = call.content(0)
    if call.layouts[0].kind != "rows" or not isinstance(element, Value) or element.dims is None:
        return Decision([None], [WHOLE])
    dims = [None if _is_of_list(dim) else dim for dim in element.dims]
    content = array(dims) if all(d is None or d.value is not None for d in dims) else None
    return Decision([None], [WHOLE], values=[Value(WHOLE, (Dim(len(dims)),), content)])


@rule("TensorListResize")
def list_resize(call: Call) -> Decision | None:
    """A list with another number of elements."""
    inputs = [None, None if is_plain(call.layouts[1]) else WHOLE]
    layout = call.layouts[0]
    value = _list_of(layout, _without_content(call.content(0)))
    return Decision(inputs, [layout], values=[value])


def of_lists(call: Call) -> Decision | None:
    """Passes on a list or an optional value, adds lists, or makes one of zeros."""
    if call.has("local"):
        return None
    layouts = {v for v in call.layouts if v.kind != "unset"}
    layout = layouts.pop() if layouts else UNSET
    inputs: list[Layout | None] = [
        None if v.kind == "unset" or v == layout else layout for v in call.layouts
    ]
    values = [v for v in call.values if v.layout.kind != "unset"] or list(call.values)
    result = values[0]
    for value in values[1:]:
        result = joined_values(result, value, call.op.outputs[0])
    element = result.content
    if call.type not in ("Identity", "StopGradient", "PreventGradient"):
        element = _without_content(element)
    return Decision(inputs, [layout], values=[_list_of(layout, element)])


@rule("OptionalFromValue")
def optional(call: Call) -> Decision | None:
    """A value that may not exist."""
    if len(call.values) != 1 or call.has("local"):
        return None
    given = call.values[0]
    layout = given.layout
    if layout.kind == "partial":
        layout = SETTLED_SUM if layout.is_sum else WHOLE
    element = dataclasses.replace(given, layout=layout)
    wanted = None if layout == given.layout else layout
    return Decision([wanted], [layout], values=[_list_of(layout, element)])


@rule("OptionalNone")
def no_value(call: Call) -> Decision | None:
    """Says that a value does not exist."""
    return Decision([], [UNSET], values=[Value(UNSET)])


@rule("OptionalHasValue")
def has_value(call: Call) -> Decision | None:
    """Whether a value exists."""
    return Decision([None], [WHOLE])


@rule("OptionalGetValue")
def value_of_optional(call: Call) -> Decision | None:
    """The value that exists."""
    if len(call.op.outputs) != 1 or call.has("local"):
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


def with_unknown_rows(lane: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Takes a value whose number of own rows is unknown."""
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
    """Stands for a value of another branch, which nothing reads."""
    return Decision([], [UNSET], values=[Value(UNSET, dims_of(call.op.outputs[0]))])
