"""What the default tests take of long lists; the exhaustive tier has the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

exhaustive = pytest.mark.exhaustive


def some(values: Iterable[Any], always: Collection[Any]) -> list[Any]:
    """Values for `pytest.mark.parametrize`; all but some of them are exhaustive.

    Args:
        values: the full list; tuples are values of several parameters.
        always: those of it that the default tests take.

    Raises:
        ValueError: `always` names one that is not in the list.
    """
    values = list(values)
    if strangers := [value for value in always if value not in values]:
        raise ValueError(f"`always` is a part of `values`. Received: {strangers} besides.")
    return [_case(value, value in always) for value in values]


def rotating(values: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Pairs for `pytest.mark.parametrize`, in which each value meets all others.

    The default tests take one pair of each value, with another partner each time, so that each
    partner is met too; where there are more partners than values, a value has several.
    """
    rounds = max(len(values), len(others))
    default = {(i % len(values), i % len(others)) for i in range(rounds)}
    return [
        _case((value, other), (i, j) in default)
        for i, value in enumerate(values)
        for j, other in enumerate(others)
    ]


def _case(value: Any, default: bool) -> Any:
    arguments = value if isinstance(value, tuple) else (value,)
    return pytest.param(*arguments, marks=() if default else exhaustive)
