"""Rules for operations that act on each row separately, such as convolutions and softmax."""

from collections.abc import Sequence
from typing import Any

from tfdist._src.global_view.decision import Call, Decision, dims_of, merged
from tfdist._src.global_view.layout import ONE, PARTIAL_SUM, WHOLE, Dim, Layout, product, rows
from tfdist._src.global_view.rules.table import is_whole, names, rule, same_rows

# Operations on the last axes. The rows may be on any of the leading axes.


def _cut_before(call: Call, last: int, batched: Sequence[int], outputs: Any = None) -> Any:
    """Returns the decision for an operation that acts on each slice along the last axes.

    Args:
        call: the call.
        last: the number of last axes that the operation acts on.
        batched: the indices of the operands that also have the leading axes. All other operands
            have only the last axes.
        outputs: not used; all results have rows.
    """
    target = same_rows(call, batched)
    if target is None or call.has("per_worker"):
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
        else:  # An operand with one row is broadcast.
            inputs.append(None if is_whole(layout) else WHOLE)
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


# Maps each type to the number of last axes that the operation acts on, and to the indices of the
# operands that also have the leading axes.
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
    """Acts on each slice along the last axes."""
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
    target, rank, diagonal = same_rows(call, (0, 1)), call.rank(0), call.rank(1)
    if target is None or rank is None or diagonal is None or call.has("per_worker"):
        return None
    if target.axis >= min(rank - 2, diagonal - 1):
        return None
    inputs: list[Layout | None] = [None if v == target else target for v in call.layouts[:2]]
    inputs += [None if is_whole(v) else WHOLE for v in call.layouts[2:]]
    return Decision(inputs, [target], dims=[call.dims(0)])


@rule("InTopK", "InTopKV2")
def in_top(call: Call) -> Decision | None:
    """Whether each row's class is among the classes with the highest scores."""
    target = same_rows(call, (0, 1))
    if target is None or target.axis != 0 or call.has("per_worker"):
        return None
    inputs: list[Layout | None] = [None if v == target else target for v in call.layouts[:2]]
    inputs += [None if is_whole(v) else WHOLE for v in call.layouts[2:]]
    return Decision(inputs, [target], dims=[call.dims(1)])


@rule("LookupTableFindV2")
def look_up(call: Call) -> Decision | None:
    """Looks up each element in a table."""
    keys, dims = call.layouts[1], call.dims(1)
    if keys.kind != "rows" or dims is None or call.out_rank() != len(dims):
        return None
    inputs = [None, None, None if is_whole(call.layouts[2]) else WHOLE]
    return Decision(inputs, [keys], dims=[dims], emit=with_the_rank_of_keys)


def with_the_rank_of_keys(emitter: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Looks up keys in a table, and sets the static shape of the result.

    TensorFlow cannot infer this shape from the copy of the table's handle.
    """
    results = emitter.copy(call.op, inputs)
    results[0].set_shape(inputs[1].shape)
    return results


@rule("SparseSoftmaxCrossEntropyWithLogits")
def sparse_cross_entropy(call: Call) -> Decision | None:
    """Computes the loss of each row and its gradient."""
    target = same_rows(call, (0, 1))
    if target is None or target.axis != 0:
        return None
    return Decision([target, target], [target, target], dims=[call.dims(1), call.dims(0)])


@rule("ArgMax", "ArgMin")
def arg(call: Call) -> Decision | None:
    """Finds the index of the largest or smallest element along an axis."""
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
    if dims is None or call.has("per_worker") or not all(map(is_whole, call.layouts[1:])):
        return None
    axis = int(call.attr("axis")) % (len(dims) + 1)
    depth = call.content(1)
    size = None if depth is None else depth.item()
    new = merged(call.op.outputs[0], [*dims[:axis], size, *dims[axis:]])
    if layout.kind != "rows":
        return None if layout.kind == "partial" else call.all(WHOLE, dims=[new])
    return call.all(layout.moved_to(layout.axis + (axis <= layout.axis)), dims=[new])


# Operations with the batch on the first axis.

# Maps each type to the indices of the operands with the batch axis, and to the indices of the
# operands that are shapes with a batch size.
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
    """Computes each row independently."""
    batched, shapes = _LEADING[call.type]
    target = same_rows(call, batched)
    if target is None or target.axis != 0 or call.has("per_worker"):
        return None
    if call.type == "MaxPoolWithArgmax" and call.attr("include_batch_in_index"):
        return None
    inputs: list[Layout | None] = []
    for i, layout in enumerate(call.layouts):
        if i in batched:
            one_for_all = (call.dims(i) or (None,))[0] == ONE and layout.kind == "whole"
            inputs.append(None if layout == target or one_for_all else target)
        else:
            inputs.append(None if is_whole(layout) else WHOLE)
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
    """Returns the required layout of the transforms: whole if one transform is for all images."""
    dims = call.dims(1)
    if dims is not None and dims[0] == ONE:
        return None if is_whole(call.layouts[1]) else WHOLE
    return None if call.layouts[1] == target else target


# Maps each type to the operands with rows, which are the images and the gradients of the outputs.
_FILTER_GRADIENTS = {
    **dict.fromkeys(
        names("Conv2DBackpropFilter Conv3DBackpropFilterV2 DepthwiseConv2dNativeBackpropFilter"),
        (0, 2),
    ),
    "Dilation2DBackpropFilter": (0, 2),
}


@rule(*_FILTER_GRADIENTS)
def filter_gradient(call: Call) -> Decision | None:
    """Computes the gradient of filters, which is a sum over the rows."""
    first, second = _FILTER_GRADIENTS[call.type]
    target = same_rows(call, (first, second))
    if target is None or target.axis != 0:
        return None
    inputs: list[Layout | None] = [None if is_whole(v) else WHOLE for v in call.layouts]
    for i in (first, second):
        inputs[i] = None if call.layouts[i] == target else target
    return Decision(inputs, [PARTIAL_SUM])


@rule("Dilation2DBackpropInput")
def dilation_gradient(call: Call) -> Decision | None:
    """Computes the gradient of a dilation with respect to the images."""
    target = same_rows(call, (0, 2))
    if target is None or target.axis != 0:
        return None
    inputs = [None if v == target else target for v in call.layouts]
    inputs[1] = None if is_whole(call.layouts[1]) else WHOLE
    return Decision(inputs, [target], dims=[call.dims(0)])


@rule("SpaceToBatchND", "BatchToSpaceND")
def between_space_and_batch(call: Call) -> Decision | None:
    """Moves blocks between the spatial axes and the batch axis, as in dilated convolutions."""
    dims, layout, block = call.dims(0), call.layouts[0], call.ints(1)
    if dims is None or layout.kind != "rows" or layout.axis != 0 or block is None:
        return None
    if not all(map(is_whole, call.layouts[1:])):
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
    """Adds a bias to each channel."""
    layout = call.layouts[0]
    if layout.kind != "rows" or call.layouts[1].kind != "whole":
        return None
    rank = call.rank(0) or 0
    channels = 1 if call.attr("data_format") == b"NCHW" else rank - 1
    return call.all(layout, dims=[call.dims(0)]) if layout.axis != channels else None


@rule("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
def fused_batch_normalization(call: Call) -> Decision | None:
    """Normalizes with given statistics, since statistics of the batch would couple the rows."""
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
    """Computes the gradients of a normalization with given statistics."""
    target = same_rows(call, (0, 1))
    if call.attr("is_training") or target is None or target.axis != 0:
        return None
    if not all(v.kind == "whole" for v in call.layouts[2:]):
        return None
    inputs = [None if v == target else target for v in call.layouts[:2]]
    outputs = [target, PARTIAL_SUM, PARTIAL_SUM, WHOLE, WHOLE]
    dims = [call.dims(0), *[dims_of(t) for t in call.op.outputs[1:]]]
    return Decision([*inputs, *[None] * (len(call.values) - 2)], outputs, dims=dims)
