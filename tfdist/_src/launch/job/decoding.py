"""Reads what other launchers send: types are checked, never converted."""

from __future__ import annotations

import enum
import math
import types
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
# Beyond these, neither clocks nor the system's calls take numbers.
_MOST_INTEGER = 1 << 53
_MOST_SECONDS = 1e11


def decode(kind: type[_T], value: object) -> _T:
    """Reads a value that has come as JSON; the inverse of `dataclasses.asdict`.

    Args:
        kind: `int`, `float`, `str`, `bool`, an `IntEnum`, `tuple[X, ...]`, or a dataclass of these
            and of `X | None`. A dataclass may raise ValueError for what its types do not exclude.
        value: what `json.loads` has returned.

    Raises:
        ValueError: the value is not of this kind.

    Example:
        >>> decode(tuple[int, ...], [1, 2])
        (1, 2)
    """
    read: _T = _read(kind, value)
    return read


def _read(kind: Any, value: Any) -> Any:
    if get_origin(kind) is types.UnionType:
        (inner,) = [one for one in get_args(kind) if one is not types.NoneType]
        return None if value is None else _read(inner, value)
    if get_origin(kind) is tuple:
        if type(value) is list:
            return tuple(_read(get_args(kind)[0], one) for one in value)
    elif is_dataclass(kind):
        make: Any = kind
        if type(value) is dict and value.keys() == {field.name for field in fields(kind)}:
            hints = get_type_hints(kind)
            return make(**{name: _read(hints[name], one) for name, one in value.items()})
    elif kind is float:
        if type(value) in (int, float) and abs(value) <= _MOST_SECONDS and math.isfinite(value):
            return float(value)
    elif issubclass(kind, enum.IntEnum):
        if type(value) is int:
            return kind(value)
    elif type(value) is kind and (kind is not int or abs(value) <= _MOST_INTEGER):
        return value
    raise ValueError(f"sent something that is not {kind!r}")
