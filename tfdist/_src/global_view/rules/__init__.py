"""Rules for partitioning each type of operation along the rows of a batch.

A rule takes a `Call` and returns a `Decision`, or None if the rule does not apply to the operands.
In that case, the operands are gathered and the operation runs on the whole batch, which is always
correct. The docstring of a rule describes the operations that the rule partitions.
"""

from tfdist._src.global_view.rules import control_flow, elementwise, lookup, rowwise, shapes, state
from tfdist._src.global_view.rules.table import (
    AVERAGE,
    CONTRIBUTION,
    EQUAL,
    PER_WORKER_BEGIN,
    PER_WORKER_END,
    PER_WORKER_TYPES,
    RULES,
    STACK,
    SUM,
)

__all__ = [
    "AVERAGE",
    "CONTRIBUTION",
    "EQUAL",
    "PER_WORKER_BEGIN",
    "PER_WORKER_END",
    "PER_WORKER_TYPES",
    "RULES",
    "STACK",
    "SUM",
    "control_flow",
    "elementwise",
    "lookup",
    "rowwise",
    "shapes",
    "state",
]
