"""Memory shared by processes of one host: a file in /dev/shm that is soon unlinked."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import time

from tfdist._src.cluster.mesh.colocation import MEMORY
from tfdist._src.cluster.net.descriptors import Descriptor, close_on_fork

_NAME = re.compile(r"tfdist-[0-9a-f]{32}")
# A file exists only briefly, and its creator holds a lock on it for all but the first moment.
_ABANDONED_SECONDS = 60.0


class Segment:
    """Memory created by this process, zero-filled.

    Creating a segment also removes the files of this user's processes that were killed before
    `unlink`.

    Args:
        size: its size in bytes, >= 1. The space is actually reserved, so that a full file system
            raises an error here, instead of killing a process that writes to the memory later.

    Attributes:
        name: an unguessable name by which other processes of this user open it, until `unlink`.
        descriptor: the memory.

    Raises:
        OSError: it cannot be created.
    """

    def __init__(self, size: int) -> None:
        _remove_abandoned()
        self.name = f"tfdist-{secrets.token_hex(16)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self.descriptor = close_on_fork(Descriptor(os.open(_path(self.name), flags, 0o600)))
        try:
            with contextlib.suppress(OSError):  # without locks, no process can remove it either
                fcntl.flock(self.descriptor.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(self.descriptor.fileno(), 0, size)
        except BaseException:
            self.unlink()
            self.descriptor.close()
            raise

    def unlink(self) -> None:
        """Removes the name; open descriptors stay valid. Calling this again has no effect."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_path(self.name))


def open_segment(name: str, size: int) -> Descriptor:
    """Opens memory created by another process.

    Args:
        name: its name.
        size: its expected size in bytes.

    Returns:
        The memory.

    Raises:
        OSError: it does not exist, or belongs to another user.
        ValueError: it is not a segment of this size.
    """
    if not _NAME.fullmatch(name):
        raise ValueError("it does not have the name of a tfdist segment")
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = close_on_fork(Descriptor(os.open(_path(name), flags)))
    status = os.fstat(descriptor.fileno())
    if not stat.S_ISREG(status.st_mode) or status.st_size != size:
        descriptor.close()
        raise ValueError(f"it has {status.st_size} bytes here instead of {size}")
    return descriptor


def remedy(error: OSError) -> str:
    """The remedy for a failure to create a segment."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"Enlarge {MEMORY}; for a container, use docker run --shm-size=1g."
    return f"Make {MEMORY} a writable tmpfs; for a container, use docker run --shm-size=1g."


def _remove_abandoned() -> None:
    """Removes files whose creator has died, in any container: the system has released its lock."""
    with contextlib.suppress(OSError):
        for name in filter(_NAME.fullmatch, os.listdir(MEMORY)):
            with contextlib.suppress(OSError):
                if os.lstat(_path(name)).st_mtime < time.time() - _ABANDONED_SECONDS:
                    _remove_unless_locked(name)


def _remove_unless_locked(name: str) -> None:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = close_on_fork(Descriptor(os.open(_path(name), flags)))
    try:
        fcntl.flock(descriptor.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(_path(name))
    finally:
        descriptor.close()


def _path(name: str) -> str:
    return os.path.join(MEMORY, name)
