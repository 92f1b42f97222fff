"""Selects the cases of long lists that run by default, or that another marker selects."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

exhaustive = pytest.mark.exhaustive


def some(values: Iterable[Any], always: Collection[Any], **marked: Collection[Any]) -> list[Any]:
    """Returns values for `pytest.mark.parametrize`; all except `always` are exhaustive.

    Args:
        values: the full list; tuples are values of several parameters.
        always: the values that also run by default.
        **marked: the values that get another marker, by its name.

    Raises:
        ValueError: `always` or `marked` has a value that is not in the list.
    """
    values = list(values)
    for name, chosen in {"always": always, **marked}.items():
        if strangers := [value for value in chosen if value not in values]:
            raise ValueError(f"`{name}` is a part of `values`. Received: {strangers} besides.")
    return [
        _case(
            value,
            value in always,
            [getattr(pytest.mark, name) for name, chosen in marked.items() if value in chosen],
        )
        for value in values
    ]


def rotating(values: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Returns all pairs of a value and one of `others`, for `pytest.mark.parametrize`.

    By default, each value runs with a different one of `others`, in rotation, so that each value
    and each of `others` runs at least once.
    """
    rounds = max(len(values), len(others))
    default = {(i % len(values), i % len(others)) for i in range(rounds)}
    return [
        _case((value, other), (i, j) in default)
        for i, value in enumerate(values)
        for j, other in enumerate(others)
    ]


def _case(value: Any, default: bool, marks: Sequence[pytest.MarkDecorator] = ()) -> Any:
    arguments = value if isinstance(value, tuple) else (value,)
    return pytest.param(*arguments, marks=marks if default else [exhaustive, *marks])


def in_part(nodeid: str, part: str) -> bool:
    """Whether a case belongs to a part of the tests, the same on all machines.

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
