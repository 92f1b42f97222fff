"""Files that are either complete or not there, also after a power failure."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes a file under a temporary name, syncs it to the disk, and renames it.

    Args:
        path: the file, in an existing folder.
        write: writes the contents to the open file.

    Raises:
        OSError: the file cannot be written; nothing is left of it.
    """
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with unfinished.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Makes a folder, and those above it, and makes their names durable.

    Raises:
        OSError: it cannot be made.
    """
    if not folder.parent.exists():
        make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names of a folder's files durable, where the file system supports it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
