"""A lock between processes, so that one compiles while the others wait."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tfdist.errors import NativeUnavailableError

SECONDS = 900.0
_FIRST_SECONDS = 2.0
_EVERY_SECONDS = 10.0
_POLL_SECONDS = 0.05


@contextlib.contextmanager
def held(path: Path, seconds: float, announce: Callable[[str], object]) -> Iterator[None]:
    """Holds the lock; the system releases it if this process dies.

    Args:
        path: the lock file, created if missing and never removed; it names the last holder.
        seconds: how long to wait for another process.
        announce: periodically receives a message that names the holder.

    Raises:
        NativeUnavailableError: another process still holds it after `seconds`.
        OSError: the file cannot be created.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        _take(descriptor, path, seconds, announce)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, path: Path, seconds: float, announce: Callable[[str], object]) -> None:
    start = time.monotonic()
    next_line = start + _FIRST_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        except OSError:
            # A file system without locks. Several processes may then compile the same build; each
            # moves its result into place atomically, so that none sees a partial one.
            return
        now = time.monotonic()
        holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
        if now - start > seconds:
            raise NativeUnavailableError(
                f"The native collectives were not compiled within {seconds:.0f} s by {holder}, "
                f"which holds {path}: check what it is doing, stop it, and try again."
            )
        if now >= next_line:
            next_line = now + _EVERY_SECONDS
            announce(
                f"waiting for {holder}, which is compiling the native collectives "
                f"[{now - start:.0f} s of {seconds:.0f} s]"
            )
        time.sleep(_POLL_SECONDS)
