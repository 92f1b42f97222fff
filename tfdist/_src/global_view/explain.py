"""Tells what a partitioned step communicates: from which of the user's lines, how much, and why."""

from __future__ import annotations

import dataclasses
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tfdist._src.global_view.analysis import Analysis
from tfdist._src.global_view.decision import Value
from tfdist._src.global_view.layout import WHOLE, Layout, Symbol
from tfdist._src.global_view.transfer import SPARSE_GRADIENT, STATISTICS, Transfer, report

_PACKAGES = (
    str(Path(__file__).resolve().parents[2]) + os.sep,
    sysconfig.get_paths()["stdlib"] + os.sep,
)
_COLLECTIVES = (
    "TfdistAllReduce",
    "TfdistCompressedAllReduce",
    "TfdistReduceScatter",
    "CollectiveReduceV2",
    "CollectiveReduceV3",
)
_OPTIMIZERS = os.path.join("keras", "src", "optimizers", "")


def transfers(
    analysis: Analysis,
    batch: int | None = None,
    replicas: int | None = None,
    layouts: Sequence[Layout] | None = None,
) -> list[Transfer]:
    """The values that a partitioned graph communicates.

    Args:
        analysis: the graph and its layouts.
        batch: the number of rows of the batch, for the sizes.
        replicas: the number of replicas, for the sizes.
        layouts: those that a worker needs of the graph's outputs; whole by default.
    """
    layouts = layouts or [WHOLE] * len(analysis.outputs)
    found = list(_transfers(analysis, layouts, analysis.batch, batch, set()))
    return [_of_replicas(t, replicas) if t.operation == _MOMENTS else t for t in found]


_MOMENTS = "moments"


def _of_replicas(transfer: Transfer, count: int | None) -> Transfer:
    """A transfer of what each replica has computed, with the number of replicas."""
    one = transfer.size
    size = None if one is None or count is None else one * count
    return dataclasses.replace(transfer, size=size, shape=(count, *transfer.shape[1:]))


def _transfers(
    analysis: Analysis,
    layouts: Sequence[Layout],
    symbol: Symbol,
    batch: int | None,
    seen: set[int],
    why: str = "a result for all rows",
) -> Iterator[Transfer]:
    for op, decision in analysis.decisions.items():
        for tensor, layout in zip(op.inputs, decision.inputs, strict=True):
            value = analysis.value_of(tensor)
            own = value.layout
            if layout is None or layout == own or own.kind not in ("rows", "partial"):
                continue
            if (own.is_sum and layout.is_sum) or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            yield _transfer(op, tensor, value, decision.reason, symbol, batch)
        if op.type in _COLLECTIVES:
            for tensor in op.inputs:
                if tensor.dtype.is_floating:
                    value, source = analysis.value_of(tensor), _source(tensor)
                    yield _transfer(source, tensor, value, "", symbol, batch, kind="reduce")
        for part in decision.parts:
            inside = decision.outputs
            if len(inside) != len(part.outputs):  # The condition of a loop.
                inside = [value.layout for value in part.outputs]
            yield from _transfers(part, inside, symbol, batch, seen, "rows are coupled")
    results = zip(analysis.graph.outputs, analysis.outputs, layouts, strict=True)
    for tensor, value, layout in results:
        is_apart = layout == WHOLE and value.layout.kind in ("rows", "partial")
        if is_apart and id(tensor) not in seen:
            seen.add(id(tensor))
            reason = why if value.layout.kind == "rows" else ""
            yield _transfer(tensor.op, tensor, value, reason, symbol, batch)


def _source(tensor: Any) -> Any:
    """The operation that has computed a value which is passed on."""
    while tensor.op.type in ("Identity", "IdentityN", "EnsureShape"):
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor.op


def _transfer(
    op: Any,
    tensor: Any,
    value: Value,
    reason: str,
    symbol: Symbol,
    batch: int | None,
    *,
    kind: str = "",
) -> Transfer:
    shape = _sizes(value, symbol, batch)
    operation = op.type
    if value.layout.how == "stack":
        shape, operation = (1, *shape[1:]), _MOMENTS
        kind, reason = "gather", STATISTICS
    elif value.layout.kind == "rows" and _is_of_optimizer(op):
        reason = SPARSE_GRADIENT
    count: int | None = 1
    for size in shape:
        count = None if count is None or size is None else count * size
    element = tensor.dtype.size or 0
    bytes_ = count * element if count is not None and element else None
    kind = kind or ("gather" if value.layout.kind == "rows" else "reduce")
    reason = reason if kind == "gather" else ""
    return Transfer(kind, operation, bytes_, shape, where(op), reason, element)


def _sizes(value: Value, symbol: Symbol, batch: int | None) -> tuple[int | None, ...]:
    sizes: list[int | None] = []
    for dim in value.dims or ():
        size: int | None = dim.factor
        for one in dim.symbols:
            known = batch if one is symbol and one.size is None else one.size
            size = None if size is None or known is None else size * known
        sizes.append(size)
    return tuple(sizes)


def _is_of_optimizer(op: Any) -> bool:
    """Whether an operation belongs to an optimizer, which uses only sparse gradients by rows."""
    return any(_OPTIMIZERS in frame.filename for frame in op.traceback or ())


def where(op: Any) -> str:
    """The line of the user's code that an operation comes from, or the operation's name."""
    for frame in reversed(op.traceback or ()):
        path = os.path.abspath(frame.filename)
        outside = not path.startswith(_PACKAGES) and f"{os.sep}site-packages{os.sep}" not in path
        if outside and os.path.exists(path):
            return f"{os.path.basename(path)}:{frame.lineno}"
    return str(op.name)


__all__ = ["Transfer", "report", "transfers", "where"]
