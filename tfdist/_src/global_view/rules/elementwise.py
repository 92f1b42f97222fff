"""Rules for elementwise operations with broadcasting, reductions, and contractions."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist._src.global_view.contents import Axes, broadcast
from tfdist._src.global_view.decision import Call, Decision, as_ints, merged
from tfdist._src.global_view.layout import ONE, PARTIAL_SUM, WHOLE, Dim, Layout, partial
from tfdist._src.global_view.rules.control_flow import of_lists
from tfdist._src.global_view.rules.table import is_whole, names, rule, sums

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
# Linear operations can be applied to each worker's part of a partial sum. `_LINEAR` has the unary
# operations; `_LINEAR_IN` maps binary operations to the operands that may be partial sums.
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
    """Computes each element independently, and broadcasts the operands."""
    if call.op.outputs[0].dtype == tf.variant:
        return of_lists(call)
    if call.has("per_worker"):
        return None
    if call.type == "Bitcast" and call.rank(0) != call.out_rank():
        return None  # The operation adds or removes the last axis.
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
    """Returns the decision for operands without rows if some of them are partial."""
    reductions = {v.reduction for v in call.layouts if v.kind == "partial"}
    result = next(v for v in call.layouts if v.kind == "partial")
    dims = _broadcast_dims(call)
    more: dict[str, Any] = {} if dims is None else {"dims": [dims]}
    if call.type in _CONSTANT:
        return call.all(WHOLE, **more)
    if len(reductions) > 1:
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
        inputs, result = sums(call.layouts)
        return Decision(inputs, [result], **more)
    # `Div` rounds integers.
    rounds = call.type == "Div" and call.op.outputs[0].dtype.is_integer
    allowed = () if rounds else _LINEAR_IN.get(call.type, ())
    which = [i for i, v in enumerate(call.layouts) if v.kind == "partial"]
    if len(which) == 1 and which[0] in allowed:
        return call.all(result, **more)
    return None


def _widens(call: Call) -> bool:
    """Whether a cast preserves all values, so that the terms of a sum can be cast instead."""
    given, to = call.op.inputs[0].dtype, call.op.outputs[0].dtype
    if given.is_integer or not to.is_floating:
        return False  # A sum of integers may wrap around, but not after a cast to a wider type.
    return not given.is_floating or bool(to.size > given.size)


def _target_rows(call: Call) -> tuple[int, Layout] | None:
    """Finds the operand of the highest rank that has rows; returns its axis of rows and its layout.

    The axis is counted from the end, as in broadcasting.
    """
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
    """Returns the decision to compute each worker's rows of the result.

    Args:
        call: the call.
        target: the result of `_target_rows`.
    """
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
            inputs.append(None if is_whole(own) else WHOLE)
            continue
        if row is not None and row.value is None and dims[axis].value is not None:
            return None  # The two sizes are equal only for one particular number of rows.
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


def relax_shape(emitter: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Adds an operation; the number of rows in its attribute `shape` becomes unknown."""
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
    """Selects elements, or whole slices if the condition is a vector."""
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
    if call.has("per_worker") or not is_whole(call.layouts[1]):
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
    reduction = _REDUCTIONS[call.type]
    if not reduction:
        return None
    if reduction == "mean":
        if not (call.op.inputs[0].dtype.is_floating or call.op.inputs[0].dtype.is_complex):
            return None
        return call.all(PARTIAL_SUM, emit=mean_of_rows, **more)
    return call.all(_reduced(call), **more)


def _sum_of_broadcast(call: Call, axes: Axes, keep: bool) -> Decision | None:
    """Returns the decision for summing a gradient along the axes in `axes`."""
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


def mean_of_rows(emitter: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Returns this worker's term of a mean: the mean of its rows times its fraction of all rows."""
    (mean,) = emitter.copy(call.op, inputs)
    return [mean * emitter.fraction(mean.dtype)]


@rule("BiasAddGrad")
def bias_gradient(call: Call) -> Decision | None:
    """Sums over all axes except the channels."""
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
    """Computes half the sum of squares."""
    return call.all(PARTIAL_SUM) if call.layouts[0].kind == "rows" else None


# Contractions.


@rule("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def matmul(call: Call) -> Decision | None:
    """Multiplies matrices."""
    left, right = call.dims(0), call.dims(1)
    if left is None or right is None or call.has("per_worker"):
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
    """Computes any contraction."""
    equation = call.attr("equation").decode().replace(" ", "")
    given, _, result = equation.partition("->")
    terms = given.split(",")
    ranks = [call.rank(i) for i in range(len(terms))]
    if None in ranks or call.has("per_worker"):
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


def contraction(call: Call, labels: Sequence[Sequence[Any]], out: Sequence[Any]) -> Decision | None:
    """Returns the decision for a contraction, such as a matrix product.

    Args:
        call: the call.
        labels: for each operand, the labels of its axes, as in `tf.einsum`. An axis that is
            broadcast has the label None.
        out: the labels of the result's axes.
    """
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
    # Rows on a contracted axis are preferred, because a sum is cheaper than a gather.
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
            inputs.append(None if is_whole(layout) else WHOLE)
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
