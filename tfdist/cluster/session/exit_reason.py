"""Remembers an uncaught exception, so that the last word to the others can name it."""

from __future__ import annotations

import sys
from types import TracebackType

_LONGEST = 300
_failure: str | None = None
_watching = False


def watch() -> None:
    """Begins to watch; the exception hook that is in place is still called."""
    global _watching
    if _watching:
        return
    _watching = True
    previous = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        global _failure
        _failure = describe(value)
        previous(kind, value, trace)

    sys.excepthook = hook


def failure() -> str | None:
    """The exception that is ending this process; None where none does."""
    return _failure


def describe(error: BaseException) -> str:
    """The type of an exception and the first line of its message.

    Example:
        >>> describe(ValueError("wrong\\nin detail"))
        'ValueError: wrong'
    """
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text[:_LONGEST]
