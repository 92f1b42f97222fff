"""Rules of the borders around what each worker computes by itself, such as statistics of its rows.

Between the borders all values are a worker's own, so operations are copied as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfdist._src.global_view.decision import Call, Decision, Value
from tfdist._src.global_view.layout import LOCAL, SETTLED_SUM, WHOLE, Layout, partial
from tfdist._src.global_view.rules.table import AVERAGE, ENTER, LEAVE, STACK, SUM, is_plain


def border(call: Call) -> Decision | None:
    """The decision for an operation at a border; None for other operations."""
    marks = call.op.node_def.attr
    for mark, decide in _BORDERS.items():
        if mark in marks:
            return decide(call)
    return None


def _enter(call: Call) -> Decision:
    """Own rows, or a whole value, become a worker's own value."""
    own = call.layouts[0]
    wanted = _outside(call, ENTER) if len(call.values) > 1 else WHOLE
    is_there = own.kind == "local" or own == wanted or (is_plain(own) and is_plain(wanted))
    inputs: list[Layout | None] = [None if is_there else wanted]
    inputs += [None] * (len(call.values) - 1)
    values = [Value(LOCAL), *call.values[1:]]
    return Decision(inputs, [v.layout for v in values], values=values, emit=pass_all)


def _leave(call: Call) -> Decision:
    """A worker's own value becomes own rows, or a value that is the same on all workers."""
    own, like = call.layouts[0], call.values[1]
    if like.layout.kind == "local":
        layout = LOCAL  # Within other borders.
    else:
        layout = _outside(call, LEAVE)
    is_there = own.kind == "local" or own == layout
    values = [Value(layout, like.dims), like]
    inputs = [None if is_there else layout, None]
    return Decision(inputs, [v.layout for v in values], values=values, emit=pass_all)


def _outside(call: Call, mark: str) -> Layout:
    """The layout at a border: that of the second operand, if its axis of rows may be cut."""
    like = call.layouts[1]
    return like if like.kind == "rows" and like.axis in call.attr(mark) else WHOLE


def pass_all(lane: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Passes on all operands."""
    return list(inputs)


def _sum(call: Call) -> Decision:
    """Own values become parts of a sum."""
    if call.layouts[0].kind != "local":
        return Decision([None if call.layouts[0] == SETTLED_SUM else SETTLED_SUM], [SETTLED_SUM])
    return call.all(SETTLED_SUM, emit=settle)


def settle(lane: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """An own value; zeros on a worker without rows."""
    return [lane.settled(inputs[0]) if call.layouts[0].kind == "local" else inputs[0]]


def _average(call: Call) -> Decision:
    """Own values become parts of their mean, in which the rows of a worker are its weight."""
    if call.layouts[0].kind != "local":
        return call.all(call.layouts[0], emit=pass_all)
    return call.all(SETTLED_SUM, emit=weigh)


def weigh(lane: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """An own value times this worker's share of all rows."""
    return [lane.settled(inputs[0] * lane.fraction(inputs[0].dtype))]


def _stack(call: Call) -> Decision:
    """Own values of a first axis of size one become those of all workers, along this axis."""
    if call.layouts[0].kind != "local":
        return call.all(call.layouts[0], emit=pass_all)
    return call.all(partial("stack"))


_BORDERS = {ENTER: _enter, LEAVE: _leave, SUM: _sum, AVERAGE: _average, STACK: _stack}
