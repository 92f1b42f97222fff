"""Checks of the arguments of callbacks."""

from __future__ import annotations

from typing import Any


def is_positive(value: Any) -> bool:
    """Whether a value is a positive integer, and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
