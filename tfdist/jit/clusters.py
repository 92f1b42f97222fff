"""Which operations XLA compiles together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.jit.left_out import communicates, device_of
from tfdist.jit.program import Program, has_shape

_LEAST_OPERATIONS = 8
_LARGE = 1 << 14  # elements
_NOTHING = ("Identity", "NoOp", "Pack", "Reshape")
_HEAVY = ("MatMul", "BatchMatMul", "Einsum", "Conv", "Depthwise")
_READS = ("ReadVariableOp", "VariableShape", "VarIsInitializedOp", "ResourceGather")


@dataclass(frozen=True)
class Unit:
    """Operations that are added to the new graph together.

    Attributes:
        operations: in order.
        compiled: whether they are a cluster.
    """

    operations: Sequence[Any]
    compiled: bool


def divide(program: Program, left_out: set[Any]) -> list[Unit]:
    """Divides operations into clusters and those that are left out, in an order to run them.

    An operation belongs to the cluster of the first operation left out, in the program's order,
    that needs it; what none of them needs comes last. So a cluster waits for nothing that this
    operation would not wait for, and no two clusters wait for each other. What depends on this
    worker's rows is kept apart from what does not: whether the former is compiled may differ
    between workers.

    Args:
        program: the program.
        left_out: its operations that XLA does not compile.
    """
    number = {op: i for i, op in enumerate(program.operations)}
    marks = {op for op in program.operations if op.type == "TfdistReady"}
    left_out = left_out | _ends(program, left_out, marks)
    first = _needed_first(program, left_out - marks)
    own = _depend_on_rows(program)
    groups: dict[tuple[int, bool, str], list[Any]] = {}
    for op in program.operations:
        if op not in left_out:
            groups.setdefault((first[op], op in own, device_of(op)), []).append(op)
    # The operation that a cluster is for comes behind it, and before that what the cluster reads.
    placed: list[tuple[tuple[int, int, bool, str, int], Unit]] = []
    for op in program.operations:
        if op in left_out:
            position, behind = (first[op], 1) if op in marks else (number[op], 2)
            placed.append(((position, behind, False, "", 0), Unit([op], compiled=False)))
    for (position, rows, device), members in groups.items():
        reads = _only_read(program, members)
        rest = [op for op in members if op not in set(reads)]
        placed.append(((position, 0, rows, device, 0), Unit(reads, compiled=False)))
        placed.append(((position, 0, rows, device, 1), Unit(rest, compiled=_is_worth_it(rest))))
    placed = [(key, unit) for key, unit in placed if unit.operations]
    return [unit for _, unit in sorted(placed, key=lambda item: item[0])]


def _needed_first(program: Program, boundaries: set[Any]) -> dict[Any, int]:
    """For each operation, the number of the first boundary that needs it."""
    first = dict.fromkeys(program.operations, len(program.operations))
    for number, op in reversed(list(enumerate(program.operations))):
        needed_by = number if op in boundaries else first[op]
        for source in program.before[op]:
            first[source] = min(first[source], needed_by)
    return first


def _ends(program: Program, left_out: set[Any], marks: set[Any]) -> set[Any]:
    """What waits for marks, which must not end a cluster, at the end of a function.

    Marks tell the recorder that others have run (`collective/marks.py`). What else but collectives
    and such ends waits for a mark takes it out of `marks`.
    """
    ends: set[Any] = set()
    for op in program.operations:
        if op not in left_out and not marks.isdisjoint(program.before[op]):
            if op.type in ("Identity", "NoOp"):
                ends.add(op)
            else:
                marks -= program.before[op]
    return ends


def _is_worth_it(operations: Sequence[Any]) -> bool:
    """Whether operations take longer than the start of a compiled program, about 30 µs."""
    sizes = [t.shape.num_elements() or 0 for op in operations for t in op.outputs if has_shape(t)]
    computing = [op for op in operations if op.type not in _NOTHING]
    return (
        len(computing) >= _LEAST_OPERATIONS
        or max(sizes, default=0) >= _LARGE
        or any(op.type.startswith(_HEAVY) for op in operations)
    )


def exchanging_lists(
    program: Program, units: Sequence[Unit], results: Sequence[tf.Tensor]
) -> set[Any]:
    """The operations that pass lists of tensors from or to a cluster, which XLA cannot.

    Such are the values that a loop keeps for its backward pass.
    """
    clusters = {op: unit if unit.compiled else None for unit in units for op in unit.operations}
    found = {t.op for t in results if t.dtype == tf.variant and clusters.get(t.op)}
    for op in program.operations:
        for tensor in op.inputs:
            if tensor.dtype == tf.variant and tensor.op in clusters:
                places = clusters[op], clusters[tensor.op]
                if places[0] is not places[1]:
                    found |= {o for o, place in zip((op, tensor.op), places, strict=True) if place}
    return found


def _depend_on_rows(program: Program) -> set[Any]:
    """What depends on this worker's rows, by values or shapes, other than through communication."""
    found: set[Any] = set()
    for op in program.operations:
        if communicates(op):
            continue
        shapes = [t.shape for t in (*op.inputs, *op.outputs) if has_shape(t)]
        if not all(shape.is_fully_defined() for shape in shapes) or program.before[op] & found:
            found.add(op)
    return found


def _only_read(program: Program, members: Sequence[Any]) -> list[Any]:
    """The reads of variables that a cluster does not write.

    XLA would copy them; variables that a cluster writes are changed in place.
    """
    inside = set(members)
    written = {
        id(t)
        for op in members
        if not op.type.startswith(_READS)
        for t in op.inputs
        if t.dtype == tf.resource
    }
    return [
        op
        for op in members
        if op.type == "ReadVariableOp"
        and id(op.inputs[0]) not in written
        and not program.before[op] & inside
    ]
