"""Rules for operations that look up or scatter elements by indices."""

from tfdist._src.global_view.decision import Call, Decision, merged
from tfdist._src.global_view.layout import PARTIAL_SUM, WHOLE, ZEROED_SUM, Layout, partial
from tfdist._src.global_view.rules.table import is_whole, names, rule, same_rows, sums

# Looking up.


@rule("GatherV2")
def gather(call: Call) -> Decision | None:
    """Takes slices along an axis."""
    params, indices = call.layouts[0], call.layouts[1]
    axis, rank, index_rank = call.ints(2), call.rank(0), call.rank(1)
    if axis is None or rank is None or index_rank is None or call.has("per_worker"):
        return None
    at, batch = axis[0] % rank, int(call.attr("batch_dims"))
    given, wanted = call.dims(0), call.dims(1)
    assert given is not None and wanted is not None
    out = [*given[:at], *wanted[batch:], *given[at + 1 :]]
    dims = [merged(call.op.outputs[0], out)] if call.out_rank() in (None, len(out)) else None
    if params.is_sum and is_whole(indices):
        return call.all(params, dims=dims)
    if is_whole(params) and is_whole(indices):
        return call.all(WHOLE, dims=dims)
    if params.kind == "rows" and params.axis < batch:
        other = params if indices != params else None
        return Decision([None, other, None], [params], dims=dims)
    if indices.kind == "rows" and indices.axis < batch:
        return Decision([indices, None, None], [indices], dims=dims)
    if indices.kind == "rows":
        inputs = [None if is_whole(params) else WHOLE, None, None]
        moved = at + indices.axis - batch
        return Decision(inputs, [indices.moved_to(moved)], dims=dims)
    if params.kind == "rows" and params.axis != at and is_whole(indices):
        moved = params.axis if params.axis < at else params.axis - 1 + index_rank - batch
        return call.all(params.moved_to(moved), dims=dims)
    return None


@rule("GatherNd")
def gather_nd(call: Call) -> Decision | None:
    """Takes elements or slices at given indices."""
    params, indices, rank = call.layouts[0], call.layouts[1], call.rank(1)
    if rank is None or call.has("per_worker"):
        return None
    if indices.kind == "rows" and indices.axis < rank - 1:
        wanted, given = call.dims(1), call.dims(0)
        assert wanted is not None
        count, dims = wanted[-1].value, None
        if given is not None and count is not None:
            dims = [merged(call.op.outputs[0], [*wanted[:-1], *given[count:]])]
        return Decision([None if is_whole(params) else WHOLE, None], [indices], dims=dims)
    if not is_whole(indices) or params.kind == "partial":
        return call.all(params) if params.is_sum and is_whole(indices) else None
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
    if variable.kind == "per_worker":
        return None
    if variable.kind == "partial":
        return Decision([None, None if is_whole(indices) else WHOLE], [variable])
    if indices.kind != "rows":
        return call.all(WHOLE) if is_whole(indices) else None
    wanted = call.dims(1)
    batch = int(call.attr("batch_dims"))
    if batch:
        return None
    dims = None
    if wanted is not None and call.out_rank() is not None:
        known = [*wanted, *[None] * (call.out_rank() - len(wanted))]  # type: ignore[operator]
        dims = [merged(call.op.outputs[0], known)]
    return call.all(indices, dims=dims)


@rule("ResourceGatherNd")
def resource_gather_nd(call: Call) -> Decision | None:
    """Looks up elements or slices of a variable at given indices."""
    variable, indices = call.layouts
    if variable.kind == "per_worker":
        return None
    if variable.kind == "partial":
        return Decision([None, None if is_whole(indices) else WHOLE], [variable])
    rank = call.rank(1)
    if indices.kind != "rows" or rank is None or indices.axis >= rank - 1:
        return call.all(WHOLE) if is_whole(indices) else None
    return call.all(indices)


_SEGMENTS = {
    "UnsortedSegmentSum": "sum",
    "UnsortedSegmentMax": "max",
    "UnsortedSegmentMin": "min",
    "UnsortedSegmentProd": "product",
}


@rule(*_SEGMENTS)
def unsorted_segment(call: Call) -> Decision | None:
    """Reduces all slices that have the same segment ID."""
    data, ids, count = call.layouts
    rank = call.rank(1)
    if rank is None or not is_whole(count) or call.has("per_worker"):
        return None
    target, given, size = same_rows(call, (0, 1)), call.dims(0), call.content(2)
    reduction = _SEGMENTS[call.type]
    dims = None
    if given is not None:
        first = None if size is None else size.item()
        dims = [merged(call.op.outputs[0], [first, *given[rank:]])]
    if target is None:
        linear = data.is_sum and reduction == "sum" and is_whole(ids)
        return call.all(data, dims=dims) if linear else None
    if target.axis >= rank:
        if not is_whole(ids):
            return None
        return call.all(data.moved_to(data.axis - rank + 1), dims=dims)
    inputs = [None if v == target else target for v in (data, ids)]
    return Decision([*inputs, None], [partial(reduction)], dims=dims)


@rule("ScatterNd")
def scatter_nd(call: Call) -> Decision | None:
    """Adds slices into zeros at given indices."""
    indices, updates, shape = call.layouts
    rank = call.rank(0)
    if rank is None or not is_whole(shape) or call.has("per_worker"):
        return None
    target = same_rows(call, (0, 1))
    if target is None:
        return call.all(updates) if updates.is_sum and is_whole(indices) else None
    if target.axis >= rank - 1:
        return None
    inputs = [None if v == target else target for v in (indices, updates)]
    return Decision([*inputs, None], [PARTIAL_SUM])


_SCATTERS = names(
    "TensorScatterUpdate TensorScatterAdd TensorScatterSub TensorScatterMax TensorScatterMin"
)


@rule(*_SCATTERS)
def tensor_scatter(call: Call) -> Decision | None:
    """Combines slices of a tensor with updates."""
    tensor, indices, updates = call.layouts
    dims, places, rank = call.dims(0), call.dims(1), call.rank(2)
    if dims is None or places is None or rank is None or call.has("per_worker"):
        return None
    depth = places[-1].value
    if depth is None:
        return None
    known = [dims]
    if not call.has("rows"):
        if (
            call.type == "TensorScatterAdd"
            and is_whole(indices)
            and tensor.is_sum
            and updates.is_sum
        ):
            inputs, result = sums([tensor, updates])
            return Decision([inputs[0], None, inputs[1]], [result], dims=known)
        return None if call.has("partial") else call.all(WHOLE, dims=known)
    if indices.kind == "rows":
        if call.type != "TensorScatterAdd" or indices.axis >= len(places) - 1:
            return None
        # Each worker adds its own rows of the updates, and one worker also adds the tensor.
        return Decision(
            [
                None if tensor == ZEROED_SUM else ZEROED_SUM,
                None,
                None if updates == indices else indices,
            ],
            [PARTIAL_SUM],
            dims=known,
        )
    if not is_whole(indices):
        return None
    # The axis of the rows is inside the slices. The tensor and the updates have the same rows.
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
    """Counts integers, per row or over all rows."""
    layout = call.layouts[0]
    weights = call.dims(2)
    if layout.kind != "rows" or layout.axis != 0 or not is_whole(call.layouts[1]):
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
