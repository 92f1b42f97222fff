"""The table of rules, to which each module of this package adds its rules."""

from collections.abc import Callable, Sequence
from typing import Any

from tfdist._src.global_view.decision import Call, Decision
from tfdist._src.global_view.layout import PARTIAL_SUM, ZEROED_SUM, Layout

CONTRIBUTION = "_tfdist_contribution"
"""Marks operations whose results are a worker's contributions to the program's sums."""

EQUAL = "_tfdist_equal"
"""Marks operations whose results are equal on all workers, such as the program's sums."""

PER_WORKER_BEGIN = "_tfdist_enter"
"""Marks the start of a per-worker computation, with the axes along which rows may be cut."""

PER_WORKER_END = "_tfdist_leave"
"""Marks the end of a per-worker computation, where its values become its rows."""

SUM = "_tfdist_sum"
"""Marks operations whose results are sums of the workers' own values."""

AVERAGE = "_tfdist_average"
"""Marks operations whose results are means of the workers' own values, weighted by rows."""

STACK = "_tfdist_stack"
"""Marks operations whose results stack the workers' own values along the first axis."""

Rule = Callable[[Call], "Decision | None"]
RULES: dict[str, Rule] = {}
PER_WORKER_TYPES: set[str] = set()
"""Types of operations with rules that accept a worker's own values; others are only copied."""


def rule(*types: str, per_worker: bool = False) -> Callable[[Rule], Rule]:
    """Registers a rule for types of operations.

    Args:
        types: the types.
        per_worker: whether the rule accepts operands with the layout "per_worker", which are each
            worker's own values.
    """

    def register(function: Rule) -> Rule:
        for name in types:
            assert name not in RULES, name
            RULES[name] = function
        PER_WORKER_TYPES.update(types if per_worker else ())
        return function

    return register


def names(text: str) -> list[str]:
    """Splits a string of operation types at the spaces."""
    return text.split()


def is_whole(layout: Layout) -> bool:
    """Whether every worker holds the value for the whole batch, or no value has been written."""
    return layout.kind in ("whole", "unset")


def sums(layouts: Sequence[Layout]) -> tuple[list[Layout | None], Layout]:
    """Returns the required layouts of the terms of a sum or concatenation, and the result's layout.

    Args:
        layouts: the present layouts of the terms; each term is whole or a partial sum.
    """
    if all(v == PARTIAL_SUM for v in layouts):
        return [None] * len(layouts), PARTIAL_SUM
    return [None if v == ZEROED_SUM else ZEROED_SUM for v in layouts], ZEROED_SUM


def same_rows(call: Call, which: Any) -> Layout | None:
    """Returns the layout of the first operand in `which` that has rows; None if no operand has."""
    return next((call.layouts[i] for i in which if call.layouts[i].kind == "rows"), None)
