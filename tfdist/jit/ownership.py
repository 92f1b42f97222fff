"""Which operations are a worker's own, and which may have to give the same on all workers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from tfdist.jit.left_out import communicates
from tfdist.jit.program import Program, called_by
from tfdist.jit.tracing import is_has_rows

_READ = "ReadVariableOp"


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
    used for something else.
    """
    users: dict[Any, list[Any]] = {}
    for op in program.operations:
        for tensor in op.inputs:
            users.setdefault(tensor.op, []).append(op)
    found: set[Any] = set()
    for op in reversed(program.operations):
        effects = op.op_def.is_stateful and op.type != _READ
        if op in own or op in wanted or effects or communicates(op) or op.type == "Placeholder":
            continue
        using = users.get(op, [])
        if using and all((u in own or u in found) and not called_by(u.node_def) for u in using):
            found.add(op)
    return found
