"""This process's memory shared with its launcher, opened once."""

from __future__ import annotations

import os

from tfdist._src.options import progress_path
from tfdist._src.progress_file import ProgressFile

_file: ProgressFile | None = None
_opened = False


def progress_file() -> ProgressFile | None:
    """The memory; None without a launcher that wants to know, and in forked processes."""
    global _file, _opened
    if not _opened:
        _opened = True
        if path := progress_path():
            try:
                _file = ProgressFile(path)
            except OSError:
                pass  # Training matters more than what the launcher learns of it.
    return _file


def _forget() -> None:
    global _file, _opened
    _file, _opened = None, True


os.register_at_fork(after_in_child=_forget)
