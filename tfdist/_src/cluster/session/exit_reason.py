"""Records an uncaught exception: for the goodbye to the other workers, and for the launcher."""

from __future__ import annotations

import sys
from types import TracebackType

from tfdist._src.cluster.session.progress import progress_file

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
        if (file := progress_file()) is not None:
            file.ended_by(value)
        previous(kind, value, trace)

    sys.excepthook = hook


def watch_for_launcher() -> None:
    """Installs the hook if a launcher wants to know; for the time before the workers have met."""
    if progress_file() is not None:
        watch()


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
