"""The table of rules, which the modules of this package fill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tfdist._src.global_view.decision import Call, Decision
from tfdist._src.global_view.layout import PARTIAL_SUM, SETTLED_SUM, Layout

CONTRIBUTION = "_tfdist_contribution"
"""Marks operations whose results are what a worker contributes to sums of the program."""

EQUAL = "_tfdist_equal"
"""Marks operations whose results are equal on all workers, such as those sums."""

ENTER = "_tfdist_enter"
"""Marks operations from which on each worker computes by itself, with the axes that it may cut."""

LEAVE = "_tfdist_leave"
"""Marks operations behind which values that workers have computed by themselves are their rows."""

SUM = "_tfdist_sum"
"""Marks operations whose results are the sums of values that workers have computed themselves."""

AVERAGE = "_tfdist_average"
"""Marks operations whose results are the means of such values, weighted by rows."""

STACK = "_tfdist_stack"
"""Marks operations whose results are such values of all workers, along the first axis."""

Rule = Callable[[Call], "Decision | None"]
RULES: dict[str, Rule] = {}
OF_OWN_VALUES: set[str] = set()
"""Types of operations whose rules know values of a worker's own; others are copied as they are."""


def rule(*types: str, own_values: bool = False) -> Callable[[Rule], Rule]:
    """Registers the rule of types of operations.

    Args:
        types: the types.
        own_values: whether the rule applies if an operand is a value of a worker's own.
    """

    def register(function: Rule) -> Rule:
        for name in types:
            assert name not in RULES, name
            RULES[name] = function
        OF_OWN_VALUES.update(types if own_values else ())
        return function

    return register


def names(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


def is_plain(layout: Layout) -> bool:
    """Whether a value has the same meaning on each worker as a whole."""
    return layout.kind in ("whole", "unset")


def sums(layouts: Sequence[Layout]) -> tuple[list[Layout | None], Layout]:
    """The layouts of whole or partial operands that are added or put together, and the result's."""
    if all(v == PARTIAL_SUM for v in layouts):
        return [None] * len(layouts), PARTIAL_SUM
    return [None if v == SETTLED_SUM else SETTLED_SUM for v in layouts], SETTLED_SUM


def same_rows(call: Call, which: Any) -> Layout | None:
    """The layout of the first of some operands that has rows."""
    return next((call.layouts[i] for i in which if call.layouts[i].kind == "rows"), None)
