"""Which operations XLA compiles together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist._src.xla.program import Program, has_shape

_LEAST_OPERATIONS = 8
_LEAST_SMALL_ONES = 64
_SMALL = 32  # elements
_LARGE = 1 << 14
_ROWS = 8  # how many there may be where their number is unknown
_NOTHING = ("Const", "Identity", "InvertPermutation", "NoOp", "Pack", "Reshape", "Shape")
_HEAVY = ("MatMul", "BatchMatMul", "Einsum", "Conv", "Depthwise")
_READS = ("ReadVariableOp", "VariableShape", "VarIsInitializedOp", "ResourceGather")


@dataclass(frozen=True)
class Unit:
    """Operations that are added to the new graph together.

    Attributes:
        operations: in order.
        compiled: whether they are a cluster.
        own: whether what it computes is this worker's, so that other workers may compute it in
            another way.
    """

    operations: Sequence[Any]
    compiled: bool
    own: bool = False


def divide(program: Program, left_out: set[Any], own: set[Any]) -> list[Unit]:
    """Divides operations into clusters and those that are left out, in an order to run them.

    An operation belongs to the cluster of the first operation left out, in the program's order,
    that needs it; what none of them needs comes last. So a cluster waits for nothing that this
    operation would not wait for, and no two clusters wait for each other. What is this worker's own
    is kept apart from what may have to be equal on all workers: whether the former is compiled may
    differ between workers.

    Args:
        program: the program.
        left_out: its operations that XLA does not compile.
        own: those that compute what is this worker's own.
    """
    number = {op: i for i, op in enumerate(program.operations)}
    marks = {op for op in program.operations if op.type == "TfdistReady"}
    left_out = left_out | _ends(program, left_out, marks)
    first = _needed_first(program, left_out - marks)
    levels = _levels(program, first, left_out, own)
    groups: dict[tuple[int, int, str], list[Any]] = {}
    for op in program.operations:
        if op not in left_out:
            groups.setdefault((first[op], levels[op], program.device_of(op)), []).append(op)
    # The operation that a cluster is for comes behind it, and before that what the cluster reads.
    placed: list[tuple[tuple[int, int, int, str, int], Unit]] = []
    for op in program.operations:
        if op in left_out:
            position, behind = (first[op], 1) if op in marks else (number[op], 2)
            placed.append(((position, behind, 0, "", 0), Unit([op], compiled=False)))
    for (position, level, device), members in groups.items():
        reads = _only_read(program, members)
        rest = [op for op in members if op not in set(reads)]
        cluster = Unit(rest, compiled=_is_worth_it(rest), own=members[0] in own)
        placed.append(((position, 0, level, device, 0), Unit(reads, compiled=False)))
        placed.append(((position, 0, level, device, 1), cluster))
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
    computing = [op for op in operations if op.type not in _NOTHING]
    sizes = [max((_elements(t) for t in op.outputs), default=0) for op in computing]
    return (
        len(computing) >= _LEAST_SMALL_ONES
        or sum(size >= _SMALL for size in sizes) >= _LEAST_OPERATIONS
        or max(sizes, default=0) >= _LARGE
        or any(op.type.startswith(_HEAVY) for op in operations)
    )


def _elements(tensor: tf.Tensor) -> int:
    if not has_shape(tensor) or tensor.shape.rank is None:
        return 0
    return math.prod(_ROWS if n is None else n for n in tensor.shape)


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


def _levels(
    program: Program, first: dict[Any, int], left_out: set[Any], own: set[Any]
) -> dict[Any, int]:
    """Numbers that rise, within what one boundary needs, from own operations to others and back.

    What is not own may have to wait for what is, as an update does for a read of the same variable.
    """
    levels: dict[Any, int] = {}
    for op in program.operations:
        if op in left_out:
            continue
        levels[op] = int(op in own)
        for source in program.before[op]:
            if source in levels and first[source] == first[op]:
                changes = (source in own) != (op in own)
                levels[op] = max(levels[op], levels[source] + changes)
    return levels


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
