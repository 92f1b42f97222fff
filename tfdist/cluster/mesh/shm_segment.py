"""Memory that the processes of one host share: a file in /dev/shm that soon has no name."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import time

from tfdist.cluster.mesh.colocation import MEMORY
from tfdist.cluster.net.descriptors import Descriptor, not_for_children

_NAME = re.compile(r"tfdist-[0-9a-f]{32}")
# A name is there for moments only, and its maker holds a lock all the while but for the first one.
_ABANDONED_SECONDS = 60.0


class Segment:
    """Memory that this process has made; all of it is zero.

    Whoever makes some removes what processes of this user have left that were killed before
    `unlink`.

    Args:
        size: its bytes, at least one. They are reserved truly: where the memory is full, that is
            an error here and not the death of a process that writes to it later.

    Attributes:
        name: by which the other processes of this user open it, until `unlink`; nobody guesses it.
        descriptor: the memory.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, size: int) -> None:
        _remove_abandoned()
        self.name = f"tfdist-{secrets.token_hex(16)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self.descriptor = not_for_children(Descriptor(os.open(_path(self.name), flags, 0o600)))
        try:
            with contextlib.suppress(OSError):  # without locks nobody can remove it either
                fcntl.flock(self.descriptor.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(self.descriptor.fileno(), 0, size)
        except BaseException:
            self.unlink()
            self.descriptor.close()
            raise

    def unlink(self) -> None:
        """Takes the name away; who has opened the memory keeps it. A second time does nothing."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_path(self.name))


def open_segment(name: str, size: int) -> Descriptor:
    """Opens the memory that another process has made.

    Args:
        name: its name.
        size: the bytes that it must have.

    Returns:
        The memory.

    Raises:
        OSError: it is not there, or belongs to another user.
        ValueError: it is something else.
    """
    if not _NAME.fullmatch(name):
        raise ValueError("it has another name than shared memory of tfdist")
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = not_for_children(Descriptor(os.open(_path(name), flags)))
    status = os.fstat(descriptor.fileno())
    if not stat.S_ISREG(status.st_mode) or status.st_size != size:
        descriptor.close()
        raise ValueError(f"it has {status.st_size} bytes here and not {size}")
    return descriptor


def remedy(error: OSError) -> str:
    """What to do where memory could not be made."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"Give {MEMORY} more space; for a container that is docker run --shm-size=1g."
    return f"Make {MEMORY} a writable tmpfs; a container has one by docker run --shm-size=1g."


def _remove_abandoned() -> None:
    """Removes memory whose maker has died, in whatever container: the system has freed its lock."""
    with contextlib.suppress(OSError):
        for name in filter(_NAME.fullmatch, os.listdir(MEMORY)):
            with contextlib.suppress(OSError):
                if os.lstat(_path(name)).st_mtime < time.time() - _ABANDONED_SECONDS:
                    _remove_unless_locked(name)


def _remove_unless_locked(name: str) -> None:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = not_for_children(Descriptor(os.open(_path(name), flags)))
    try:
        fcntl.flock(descriptor.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(_path(name))
    finally:
        descriptor.close()


def _path(name: str) -> str:
    return os.path.join(MEMORY, name)
