"""Checks the types of user-supplied settings."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

_KINDS: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (numbers.Integral,),
    "float": (numbers.Real,),
    "None": (type(None),),
}


def check_types(settings: Any) -> None:
    """Checks the numeric and boolean fields of a dataclass against its annotations.

    Raises:
        ValueError: a value has a different type.
    """
    for field in dataclasses.fields(settings):
        names = str(field.type).split(" | ")
        if not set(names) <= set(_KINDS):
            continue
        value = getattr(settings, field.name)
        kinds = tuple(kind for name in names for kind in _KINDS[name])
        if not isinstance(value, kinds) or (isinstance(value, bool) and "bool" not in names):
            raise ValueError(
                f"{type(settings).__name__}: `{field.name}` must be of type {field.type}. "
                f"Received: {value!r}."
            )
