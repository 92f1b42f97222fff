"""Selects the cases of each tier: default, exhaustive, and combinations."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any

import pytest

exhaustive = pytest.mark.exhaustive


def some(
    values: Iterable[Any],
    always: Collection[Any],
    covering: Collection[Any] | None = None,
    **marked: Collection[Any],
) -> list[Any]:
    """Returns values for `pytest.mark.parametrize`; all except `always` get a marker.

    Args:
        values: all values. A tuple contains the values of several parameters.
        always: the values that also run in the default tests.
        covering: if given, only these values are `exhaustive`, and all others are `combinations`.
            By default, all values except `always` are `exhaustive`.
        **marked: for the name of another marker, the values that get this marker.

    Raises:
        ValueError: `always`, `covering` or `marked` has a value that is not in `values`.
    """
    values = list(values)
    for name, chosen in {"always": always, "covering": covering or (), **marked}.items():
        if strangers := [value for value in chosen if value not in values]:
            raise ValueError(f"`{name}` is a part of `values`. Received: {strangers} besides.")
    return [
        _case(
            value,
            value in always,
            [getattr(pytest.mark, name) for name, chosen in marked.items() if value in chosen],
            exhaustive if covering is None or value in covering else pytest.mark.combinations,
        )
        for value in values
    ]


def spread(values: Sequence[Any], others: Sequence[Any], each: int) -> list[tuple[Any, Any]]:
    """Returns pairs of each value with `each` different elements of `others`, in rotation.

    Example:
        >>> spread("abc", "1234", 2)
        [('a', '1'), ('a', '3'), ('b', '2'), ('b', '4'), ('c', '3'), ('c', '1')]
    """
    step = max(1, len(others) // each)
    return [
        (value, others[(i + j * step) % len(others)])
        for i, value in enumerate(values)
        for j in range(min(each, len(others)))
    ]


def covering(cases: Sequence[tuple[Hashable, ...]], chosen: Iterable[int] = ()) -> set[int]:
    """Selects cases that together have each value, or each pair of values.

    If there are two parameters, the selected cases contain each value of each parameter. If there
    are three or more, they contain each pair of values of two parameters that occurs in any case.
    The function uses the greedy algorithm of pairwise testing.

    Args:
        cases: the values of each case, one for each parameter; not empty.
        chosen: the indices of cases that are selected in advance.

    Returns:
        The indices of the selected cases, without `chosen`.
    """
    size = len(cases[0])
    strength = min(2, size - 1) or 1
    groups = list(itertools.combinations(range(size), strength))
    parts = [{(group, *(case[i] for i in group)) for group in groups} for case in cases]
    missing = set().union(*parts)
    for number in chosen:
        missing -= parts[number]
    found: set[int] = set()
    ties = [zlib.crc32(repr(case).encode()) for case in cases]
    while missing:
        best = max(range(len(cases)), key=lambda i: (len(parts[i] & missing), ties[i]))
        found.add(best)
        missing -= parts[best]
    return found


def reduce_combinations(items: Sequence[pytest.Item]) -> None:
    """Replaces the marker `exhaustive` by `combinations` on cases that `covering` omits."""
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec"):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for own in functions.values():
        # Each case has one identifier for each `parametrize` of its function.
        cases = [tuple(item.callspec._idlist) for item in own]
        if len(cases[0]) < 2:
            continue
        tiers = [{mark.name for mark in item.iter_markers()} for item in own]
        default = [i for i, names in enumerate(tiers) if not names & {"exhaustive", "combinations"}]
        needed = covering(cases, default)
        for i, item in enumerate(own):
            others = [mark for mark in item.own_markers if mark.name != "exhaustive"]
            # If a module marks all its tests as exhaustive, all of their cases stay exhaustive.
            if i not in needed and len(others) < len(item.own_markers):
                item.own_markers[:] = others
                item.add_marker("combinations")


def rotating(values: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Returns all pairs from `values` and `others`, for `pytest.mark.parametrize`.

    In the default tests, each value runs with only one element of `others`, in rotation, so that
    each value and each element of `others` runs at least once.
    """
    rounds = max(len(values), len(others))
    default = {(i % len(values), i % len(others)) for i in range(rounds)}
    return [
        _case((value, other), (i, j) in default)
        for i, value in enumerate(values)
        for j, other in enumerate(others)
    ]


def _case(
    value: Any,
    default: bool,
    marks: Sequence[pytest.MarkDecorator] = (),
    otherwise: pytest.MarkDecorator = exhaustive,
) -> Any:
    arguments = value if isinstance(value, tuple) else (value,)
    return pytest.param(*arguments, marks=marks if default else [otherwise, *marks])


def in_part(nodeid: str, part: str) -> bool:
    """Whether a test case belongs to a part of the tests. All machines form the same parts.

    Args:
        nodeid: the case's name. The parts of a test function have about the same number of cases.
        part: "I/N": part I of N, from 1 to N.

    Raises:
        ValueError: `part` does not have this form.
    """
    index, _, count = part.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise ValueError(f"--part must be I/N with I from 1 to N, such as 1/2. Received: {part!r}.")
    return zlib.crc32(nodeid.encode()) % int(count) == int(index) - 1
