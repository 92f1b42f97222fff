"""Warnings of what differs from one process, each given once."""

from __future__ import annotations

import functools
import warnings


@functools.cache
def warn_once(message: str) -> None:
    """Warns, unless the same was said before.

    Args:
        message: what differs, and the remedy.
    """
    warnings.warn(message, stacklevel=4)
