"""Shares a segment of memory between the ranks of each host."""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Callable

from tfdist._src.cluster.mesh.subgroups import MEMORY, SessionPlan, Subgroup, from_runs
from tfdist._src.cluster.net.sockets import Descriptor, close_on_fork
from tfdist._src.cluster.net.wait_messages import Announce
from tfdist._src.cluster.session.session import Lockstep, Report
from tfdist.errors import ClusterError

_NAME = re.compile(r"tfdist-[0-9a-f]{32}")
# Older files are abandoned unless they are locked. The creator of a file locks the file almost
# immediately, and soon removes its name.
_ABANDONED_SECONDS = 60.0


class Segment:
    """A segment of zero-filled shared memory that this process has created.

    The constructor also removes abandoned segments of this user. A segment is abandoned if its
    creator was killed before it called `unlink`.

    Args:
        size: the size in bytes, at least 1. The constructor reserves the memory, so that it raises
            an error if the file system is full. Otherwise, a process that writes to the memory
            later would be killed.

    Attributes:
        name: a random name that other users cannot guess. Until `unlink` is called, other processes
            of this user can open the memory by this name.
        descriptor: the descriptor of the memory.

    Raises:
        OSError: the memory cannot be created.
    """

    def __init__(self, size: int) -> None:
        _remove_abandoned()
        self.name = f"tfdist-{secrets.token_hex(16)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self.descriptor = close_on_fork(Descriptor(os.open(_path(self.name), flags, 0o600)))
        try:
            # If the file system does not support locks, `_remove_abandoned` removes nothing.
            with contextlib.suppress(OSError):
                fcntl.flock(self.descriptor.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(self.descriptor.fileno(), 0, size)
        except BaseException:
            self.unlink()
            self.descriptor.close()
            raise

    def unlink(self) -> None:
        """Removes the name of the memory; open descriptors stay valid. May be called repeatedly."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_path(self.name))


def open_segment(name: str, size: int) -> Descriptor:
    """Opens a segment that another process has created.

    Args:
        name: the name of the segment.
        size: the expected size of the segment in bytes.

    Returns:
        The descriptor of the memory.

    Raises:
        OSError: the segment does not exist, or it belongs to another user.
        ValueError: the name is not the name of a segment, or the segment has a different size.
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
    """Returns a sentence that tells the user what to do if a segment cannot be created."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"Enlarge {MEMORY}; for a container, use docker run --shm-size=1g."
    return f"Make {MEMORY} a writable tmpfs; for a container, use docker run --shm-size=1g."


def _remove_abandoned() -> None:
    """Removes the files of dead processes.

    A file is removed if it is not locked, because the system releases the locks of dead processes.
    This also works if the other process ran in a different container.
    """
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


_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)

SegmentBytes = Callable[[int], int]
"""Returns the size in bytes of the memory shared by a number of colocated ranks."""


class HostMemory:
    """The memory that the ranks of a group share on this host.

    The lowest of these ranks creates the memory, and the others open it.

    Args:
        group: the group of this process; None if this process does not belong to a group.
        segment_bytes: called with the number of ranks on this host; returns the size of their
            shared memory in bytes.
        announce: called with a message if the memory cannot be created.

    Attributes:
        descriptor: the descriptor of the memory; None without shared memory.
        size: the size of the memory in bytes; 0 without shared memory.
        group: the group. After `share`, each rank without shared memory has a host of its own in
            this group.
    """

    def __init__(
        self,
        group: Subgroup | None,
        segment_bytes: SegmentBytes,
        announce: Announce,
    ) -> None:
        self.group = group
        self.descriptor: Descriptor | None = None
        self.size = 0
        self._announce = announce
        self._segment_bytes = segment_bytes
        self._created: Segment | None = None
        self._name: str | None = None

    def share(self, steps: Lockstep, plan: SessionPlan) -> None:
        """Creates and opens the memory, and then removes its name.

        Args:
            steps: runs each step on all ranks of the session.
            plan: the plan by which rank 0 assigns the memory to the ranks.

        Raises:
            TfdistError: a rank cannot open the memory, or the session has failed (see
                `Lockstep.run`).
        """
        try:
            self._read(steps.run("memory", self._create, plan.share))
            steps.run("shared memory", self._open, lambda reports: reports)
        except BaseException:
            self.close()
            raise
        finally:
            if self._created is not None:
                self._created.unlink()

    def close(self) -> None:
        """Closes the memory."""
        if self.descriptor is not None:
            self.descriptor.close()

    def _create(self) -> Report:
        if self.group is None:
            return {}
        colocated = self.group.colocated(self.group.rank)
        if len(colocated) == 1:
            return {}
        self.size = self._segment_bytes(len(colocated))
        if self.size < 1:
            raise ValueError(f"segment_bytes must return a size >= 1. Received: {self.size}.")
        if self.group.rank != colocated[0]:
            return {}
        try:
            self._created = Segment(self.size)
        except OSError as error:
            if error.errno in _OUT_OF_DESCRIPTORS:
                raise
            self._announce(
                f"{len(colocated)} workers on this host cannot share {self.size} bytes in "
                f"{MEMORY} ({error.strerror or error}) and use slower TCP instead. {remedy(error)}"
            )
            return {}
        self.descriptor = self._created.descriptor
        return {"name": self._created.name}

    def _read(self, told: Report) -> None:
        """Stores the memory's name and the ranks without shared memory from rank 0's reply."""
        if self.group is None:
            return
        self._name = told["name"]
        self.group = self.group.without_memory(from_runs(told["without"]))
        if self._name is None:
            self.size = 0

    def _open(self) -> Report:
        if self.group is None or self._name is None or self._created is not None:
            return {}
        try:
            self.descriptor = open_segment(self._name, self.size)
        except (OSError, ValueError) as error:
            names, first = self.group.names, self.group.colocated(self.group.rank)[0]
            reason = getattr(error, "strerror", None) or error
            raise ClusterError(
                f"{names[self.group.rank]} cannot open the shared memory of "
                f"{names[first]} ({reason}). Run the same version of tfdist as the same user "
                f"on all workers of a host; if these are different hosts, set TFDIST_HOST to a "
                f"different name on each."
            ) from None
        return {}
