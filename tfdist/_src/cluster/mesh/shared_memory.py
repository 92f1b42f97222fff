"""Shares a memory segment among the ranks of each host."""

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
# A file exists only briefly, and its creator locks it almost immediately.
_ABANDONED_SECONDS = 60.0


class Segment:
    """Zero-filled memory created by this process.

    Creating a segment also removes the files that earlier processes of this user left behind when
    they were killed before `unlink`.

    Args:
        size: its size in bytes, >= 1. The space is actually reserved: a full file system raises an
            error here, instead of killing a process that writes to the memory later.

    Attributes:
        name: an unguessable name, by which other processes of this user can open the memory until
            `unlink`.
        descriptor: the memory.

    Raises:
        OSError: the memory cannot be created.
    """

    def __init__(self, size: int) -> None:
        _remove_abandoned()
        self.name = f"tfdist-{secrets.token_hex(16)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self.descriptor = close_on_fork(Descriptor(os.open(_path(self.name), flags, 0o600)))
        try:
            # If the file system has no locks, no other process removes the file either.
            with contextlib.suppress(OSError):
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
    """Returns the remedy for a failure to create a segment."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"Enlarge {MEMORY}; for a container, use docker run --shm-size=1g."
    return f"Make {MEMORY} a writable tmpfs; for a container, use docker run --shm-size=1g."


def _remove_abandoned() -> None:
    """Removes the files of dead creators, in any container: the system has released their locks."""
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
    """The memory that the group's ranks on this host share.

    The first of these ranks creates the memory, and the others open it.

    Args:
        group: the group of this process; None if it is in no group.
        segment_bytes: returns the size of the memory.
        announce: called with a line if the memory cannot be created.

    Attributes:
        descriptor: the memory; None if there is none.
        size: its size in bytes; 0 if there is none.
        group: the group; ranks without shared memory count as alone on their hosts.
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
        """Creates and opens the memory, and then unlinks its name.

        Args:
            steps: runs the steps on all ranks of the session.
            plan: rank 0's plan.

        Raises:
            TfdistError: some rank cannot open the memory; also see `Lockstep.run`.
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
        """Notes the name of the memory, and the ranks of the group that have none."""
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
