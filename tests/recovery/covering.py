"""Covering arrays: few combinations in which every two choices meet."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Combinations of one choice for each axis, such that any two choices of two axes are in one.

    Example:
        >>> len(pairwise({"a": [1, 2], "b": [3, 4], "c": [5, 6]}))
        4
    """
    names = list(axes)
    every = [dict(zip(names, choice, strict=True)) for choice in itertools.product(*axes.values())]
    missing = {pair for combination in every for pair in _pairs(combination)}
    rows = []
    while missing:
        best = max(every, key=lambda combination: len(missing & _pairs(combination)))
        missing -= _pairs(best)
        rows.append(best)
    return rows


def _pairs(combination: dict[str, Any]) -> set[Any]:
    texts = [(name, repr(value)) for name, value in combination.items()]
    return set(itertools.combinations(texts, 2))
