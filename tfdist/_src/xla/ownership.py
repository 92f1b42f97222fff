"""Which operations are a worker's own, and which may have to give the same on all workers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist._src.xla.left_out import communicates
from tfdist._src.xla.program import Program, called_by
from tfdist._src.xla.tracing import is_has_rows

_READ = "ReadVariableOp"
# With some inputs, their results are other inputs to the last bit. Matrix products and sums over an
# axis could be, too, but are taken to mix what they are given.
_MAY_KEEP = frozenset(
    [
        *("AddN", "AddV2", "BiasAdd", "Maximum", "Minimum", "Mul", "RealDiv", "Sub"),
        *("BroadcastTo", "Cast", "Identity", "Relu", "Select", "SelectV2", "StopGradient"),
        *("ConcatV2", "DynamicStitch", "Gather", "GatherNd", "GatherV2", "Pack", "Pad", "PadV2"),
        *("ExpandDims", "Reshape", "Slice", "Split", "SplitV", "Squeeze", "StridedSlice"),
        *("Tile", "Transpose", "Unpack", "TensorScatterUpdate", "DynamicPartition"),
    ]
)


def own_operations(
    program: Program, given: Collection[Any], results: Sequence[tf.Tensor]
) -> set[Any]:
    """The operations whose results may differ between workers in their last bits.

    Args:
        program: the program.
        given: its placeholders of this worker's own values.
        results: what is wanted of it, which may have to be equal.
    """
    found = _computed_from(program, given)
    found |= _only_for(program, found, {t.op for t in results})
    # The constants of gradients wait for what they are for, and so go with it.
    return found | {
        op
        for op in program.operations
        if op.type == "Const" and not found.isdisjoint(op.control_inputs)
    }


def _computed_from(program: Program, given: Collection[Any]) -> set[Any]:
    """What computes with a worker's own values, other than by communication."""
    found = set(given)
    for op in program.operations:
        if not communicates(op) and (is_has_rows(op) or any(t.op in found for t in op.inputs)):
            found.add(op)
    return found


def _only_for(program: Program, own: Collection[Any], wanted: Collection[Any]) -> set[Any]:
    """What is computed for a worker's own operations alone, such as a mask, without effects.

    What calls functions does not count as such: in a branch of a conditional, what it takes may be
    used for something else. Nor does what may keep a value as it is on its way to a variable or a
    result, such as a choice by a condition that is the same on all workers.
    """
    users: dict[Any, list[Any]] = {}
    for op in program.operations:
        for tensor in op.inputs:
            users.setdefault(tensor.op, []).append(op)
    kept = _kept_as_they_are(program, users, wanted)
    found: set[Any] = set()
    for op in reversed(program.operations):
        if op in own or op in kept or communicates(op) or op.type == "Placeholder":
            continue
        using = users.get(op, [])
        if using and not _has_effects(op) and all(u in own or u in found for u in using):
            found.add(op)
    return found


def _kept_as_they_are(
    program: Program, users: Mapping[Any, Sequence[Any]], wanted: Collection[Any]
) -> set[Any]:
    """The operations whose results may arrive in a variable, in a function or as a result."""
    found: set[Any] = set()
    for op in reversed(program.operations):
        using = users.get(op, [])
        arrives = any(_has_effects(user) or called_by(user.node_def) for user in using)
        if op in wanted or arrives or any(u in found and u.type in _MAY_KEEP for u in using):
            found.add(op)
    return found


def _has_effects(op: Any) -> bool:
    return bool(op.op_def.is_stateful) and op.type != _READ and not communicates(op)
