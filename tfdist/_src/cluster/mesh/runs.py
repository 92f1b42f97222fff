"""Lists of integers in a compact form: regular ones have a size that does not depend on theirs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Runs = list[list[int]]
"""Arithmetic sequences one after the other, each as [start, step, count]."""


def to_runs(numbers: Sequence[int]) -> Runs:
    """Splits a list into arithmetic sequences.

    Example:
        >>> to_runs([0, 1, 2, 3, 7, 7, 7])
        [[0, 1, 4], [7, 0, 3]]
    """
    runs: Runs = []
    for number in numbers:
        if runs:
            start, step, count = runs[-1]
            if count == 1:
                runs[-1] = [start, number - start, 2]
                continue
            if number == start + step * count:
                runs[-1][2] += 1
                continue
        runs.append([number, 0, 1])
    return runs


def from_runs(runs: Iterable[Sequence[int]]) -> list[int]:
    """The list that `to_runs` has split.

    Example:
        >>> from_runs([[0, 1, 4], [7, 0, 3]])
        [0, 1, 2, 3, 7, 7, 7]
    """
    return [start + step * i for start, step, count in runs for i in range(count)]
