"""Which variables have been assigned between the steps, by code that only some workers may run."""

from __future__ import annotations

import weakref
from typing import Any

_assigned: dict[int, weakref.ref[Any]] = {}


def note_assigned(variable: Any) -> None:
    """Notes that a replicated variable has been assigned outside of replicas."""
    _assigned[id(variable)] = weakref.ref(variable)


def take_assigned(strategy: Any) -> list[Any]:
    """The variables of a strategy that have been assigned since the last call, which are forgotten.

    Args:
        strategy: that they have been created under.
    """
    variables = [reference() for reference in _assigned.values()]
    mine = [v for v in variables if v is not None and v.distribute_strategy is strategy]
    others = [v for v in variables if v is not None and v.distribute_strategy is not strategy]
    _assigned.clear()
    for variable in others:
        note_assigned(variable)
    return mine
