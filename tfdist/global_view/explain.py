"""Tells what a partitioned step communicates: from which of the user's lines, how much, and why."""

from __future__ import annotations

import dataclasses
import os
import sysconfig
from collections.abc import Iterator, Sequence
from typing import Any

from tfdist.global_view.analysis import Analysis
from tfdist.global_view.decision import Value
from tfdist.global_view.layout import Symbol

_PACKAGES = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    sysconfig.get_paths()["stdlib"] + os.sep,
)
_COLLECTIVES = ("TfdistAllReduce", "TfdistCompressedAllReduce", "TfdistReduceScatter")


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A value that a step communicates.

    Attributes:
        kind: "reduce" or "gather".
        operation: the type of the operation that needs it; "moments" for statistics of the batch.
        size: the bytes of the whole value; None if a dimension is unknown.
        shape: the shape of the whole value, with None for unknown dimensions.
        where: the file and line of the user's code, or the name of the operation.
        reason: why values are gathered; "" for a reduction.
    """

    kind: str
    operation: str
    size: int | None
    shape: tuple[int | None, ...]
    where: str
    reason: str

    def __str__(self) -> str:
        size = "unknown size" if self.size is None else _bytes(self.size)
        shape = "x".join("?" if n is None else str(n) for n in self.shape) or "scalar"
        why = f" ({self.reason})" if self.reason else ""
        return f"{self.kind} {size} [{shape}] for {self.operation} at {self.where}{why}"


def transfers(
    analysis: Analysis, batch: int | None = None, replicas: int | None = None
) -> list[Transfer]:
    """The values that a partitioned graph communicates.

    Args:
        analysis: the graph and its layouts.
        batch: the number of rows of the batch, for the sizes.
        replicas: the number of replicas, for the sizes.
    """
    found = list(_transfers(analysis, analysis.batch, batch, set()))
    return [_of_replicas(t, replicas) if t.operation == _MOMENTS else t for t in found]


_MOMENTS = "moments"


def _of_replicas(transfer: Transfer, count: int | None) -> Transfer:
    """A transfer of what each replica has computed, with the number of replicas."""
    one = transfer.size
    size = None if one is None or count is None else one * count
    return dataclasses.replace(transfer, size=size, shape=(count, *transfer.shape[1:]))


def _transfers(
    analysis: Analysis, symbol: Symbol, batch: int | None, seen: set[int]
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
            yield from _transfers(part, symbol, batch, seen)
    for tensor, value in zip(analysis.graph.outputs, analysis.outputs, strict=True):
        if value.layout.kind in ("rows", "partial") and id(tensor) not in seen:
            seen.add(id(tensor))
            reason = "a result for all rows" if value.layout.kind == "rows" else ""
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
        kind, reason = "gather", "statistics of each replica"
    count: int | None = 1
    for size in shape:
        count = None if count is None or size is None else count * size
    bytes_ = None if count is None or not tensor.dtype.size else count * tensor.dtype.size
    kind = kind or ("gather" if value.layout.kind == "rows" else "reduce")
    return Transfer(kind, operation, bytes_, shape, where(op), reason if kind == "gather" else "")


def _sizes(value: Value, symbol: Symbol, batch: int | None) -> tuple[int | None, ...]:
    sizes: list[int | None] = []
    for dim in value.dims or ():
        size: int | None = dim.factor
        for one in dim.symbols:
            known = batch if one is symbol and one.size is None else one.size
            size = None if size is None or known is None else size * known
        sizes.append(size)
    return tuple(sizes)


def where(op: Any) -> str:
    """The line of the user's code that an operation comes from, or the operation's name."""
    for frame in reversed(op.traceback or ()):
        path = os.path.abspath(frame.filename)
        outside = not path.startswith(_PACKAGES) and f"{os.sep}site-packages{os.sep}" not in path
        if outside and os.path.exists(path):
            return f"{os.path.basename(path)}:{frame.lineno}"
    return str(op.name)


def report(found: Sequence[Transfer]) -> str:
    """A table of what a step communicates, the largest first."""
    if not found:
        return "The step communicates nothing but the number of rows."
    gathered = sum(t.size or 0 for t in found if t.kind == "gather")
    reduced = sum(t.size or 0 for t in found if t.kind == "reduce")
    ordered = sorted(found, key=lambda t: -(t.size or 0))
    lines = [f"The step reduces {_bytes(reduced)} and gathers {_bytes(gathered)}:"]
    lines += [f"  {transfer}" for transfer in ordered]
    return "\n".join(lines)


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


__all__ = ["Transfer", "report", "transfers", "where"]
