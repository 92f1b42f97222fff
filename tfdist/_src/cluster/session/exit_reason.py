"""Records why this process ends, and reports it to its peers and its launcher."""

import os
import sys
from types import TracebackType

from tfdist._src.options import progress_path
from tfdist._src.progress_file import ProgressFile

_file: ProgressFile | None = None
_opened = False


def progress_file() -> ProgressFile | None:
    """Returns the file through which this process reports its progress to its launcher.

    None if the launcher has not requested such a file, if the file cannot be opened, or in a forked
    process.
    """
    global _file, _opened
    if not _opened:
        _opened = True
        if path := progress_path():
            try:
                _file = ProgressFile(path)
            except OSError:
                pass  # the program can run without a progress file
    return _file


def _forget() -> None:
    global _file, _opened
    _file, _opened = None, True


os.register_at_fork(after_in_child=_forget)


_MAX_LENGTH = 300
_failure: str | None = None
_watching = False


def watch() -> None:
    """Installs a hook that records an uncaught exception and then calls the previous hook."""
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
    """Installs the hook of `watch` if the launcher has requested a progress file.

    A session also installs the hook, but only after the workers have met. With this function, the
    launcher learns of earlier exceptions.
    """
    if progress_file() is not None:
        watch()


def failure() -> str | None:
    """Returns a description of the uncaught exception that terminates this process, if any."""
    return _failure


def describe(error: BaseException) -> str:
    """Returns the type of an exception and the first line of its message.

    Example:
        >>> describe(ValueError("wrong\\nin detail"))
        'ValueError: wrong'
    """
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text[:_MAX_LENGTH]
