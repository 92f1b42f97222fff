"""Warnings about differences from a single process, each issued once."""

from __future__ import annotations

import functools
import warnings


@functools.cache
def warn_once(message: str) -> None:
    """Warns, unless the same warning was issued before.

    Args:
        message: the difference and the remedy.
    """
    warnings.warn(message, stacklevel=4)
