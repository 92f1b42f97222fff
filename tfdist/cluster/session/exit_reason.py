"""Records an uncaught exception, so that the goodbye to the other workers can name it."""

from __future__ import annotations

import sys
from types import TracebackType

_MAX_LENGTH = 300
_failure: str | None = None
_watching = False


def watch() -> None:
    """Installs an exception hook; the previous hook is still called."""
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
    """The uncaught exception that is terminating this process, if any."""
    return _failure


def describe(error: BaseException) -> str:
    """The type of an exception and the first line of its message.

    Example:
        >>> describe(ValueError("wrong\\nin detail"))
        'ValueError: wrong'
    """
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text[:_MAX_LENGTH]
