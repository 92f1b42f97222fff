"""Records the promises and votes of a process in a file, and checks if a process still runs.

The record is a small file on the machine of the process. The process replaces the file before it
sends a promise or a vote to another member. After the process has died, other processes on the
machine can read its last word from the file. The process holds a lock on the file, and the system
releases the lock when the process ends.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import select
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tfdist._src.cluster.membership.consensus import AcceptorState
from tfdist._src.cluster.membership.view import ProcessIdentity
from tfdist._src.cluster.membership.wire import decode_acceptor, encode_acceptor
from tfdist._src.cluster.net.framing import WireError
from tfdist._src.cluster.net.sockets import Descriptor, close_on_fork
from tfdist._src.log import logger
from tfdist._src.options import Options

_BOOT = "/proc/sys/kernel/random/boot_id"
_START_FIELD = 22


def here(options: Options, record: str = "") -> ProcessIdentity:
    """Returns the identity of this process.

    Args:
        options: the job's options. `host` becomes part of the machine's name: processes with
            different values count as processes on different machines. `launcher.witness` is the
            address of the launcher, which tells other hosts when this process is dead.
        record: the path of the record of this process.
    """
    pid, boot = os.getpid(), _text(_BOOT)
    machine = f"boot {boot} processes {_namespace()} {options.host}".strip()
    # If the boot id is unknown, processes of another machine could have the same machine name. A
    # start time of 0 then marks the process as invisible to others.
    started = (_started(pid) or 0) if boot else 0
    return ProcessIdentity(machine, pid, started, record, options.launcher.witness)


def is_visible(other: ProcessIdentity, mine: ProcessIdentity) -> bool:
    """Whether this process can see if the process `other` is alive."""
    return other.machine == mine.machine and bool(other.started)


def is_dead(place: ProcessIdentity, seconds: float = 0.0) -> bool:
    """Whether a visible process is known to be dead, so that none of its threads runs any more.

    Args:
        place: the identity of the process (see `is_visible`).
        seconds: how long to wait for the death of the process if it is still alive.
    """
    try:
        descriptor = os.pidfd_open(place.pid)
    except ProcessLookupError:
        return True
    except OSError:  # no free descriptor, an old kernel, or a thread now has this id
        if _is_replaced(place):
            return True
        time.sleep(seconds)
        return False
    try:
        # Check the start time only after `pidfd_open`. Between an earlier check and `pidfd_open`,
        # the system could assign the id to another process.
        if _is_replaced(place):
            return True
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(1000 * seconds))
    finally:
        os.close(descriptor)


def _is_replaced(place: ProcessIdentity) -> bool:
    """Whether another process or thread now has the process id of `place`."""
    started = _started(place.pid)
    return started is not None and started != place.started


def _started(pid: int) -> int | None:
    """Returns the start time of a process, in clock ticks since boot; None if it is unknown."""
    text = _text(f"/proc/{pid}/stat")
    fields = text.rpartition(")")[2].split()  # the process name may contain spaces and ")"
    try:
        return int(fields[_START_FIELD - 3])
    except (IndexError, ValueError):
        return None


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except (OSError, ValueError):
        return ""


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


_MEMORY = "/dev/shm"
_TRIES = 3
_NAME = re.compile(r"[0-9a-f]{16}")
_NEW = ".new"
_STALE_SECONDS = 7 * 24 * 3600.0
"""The time for which a dead process's last word is kept for members that are not visible here."""
_CHANGE_SECONDS = 3600.0
"""The time after a change of the group for which a record may still lack the newcomers."""
_KNOWN_DEAD = 0o400
"""The mode of a record whose process is known to be dead; its age counts from that discovery."""


def folder() -> Path:
    """Returns the folder that contains the records of all processes of this user."""
    base = _MEMORY if os.access(_MEMORY, os.W_OK) else tempfile.gettempdir()
    return Path(base) / f".tfdist-members-{os.getuid()}"


class Record:
    """The record of this process.

    Args:
        incarnation: the random token of this process, which becomes the name of the file.

    Attributes:
        path: the path of the file. It is "" if the file cannot be written. The last word of this
            process will then be lost if the process dies.
    """

    def __init__(self, incarnation: str) -> None:
        self.path = ""
        self._name = incarnation
        self._folder = self._file = Descriptor(-1)
        for _ in range(_TRIES):  # another process may remove the new folder, which is still empty
            with contextlib.suppress(OSError):
                folder().mkdir(mode=0o700, exist_ok=True)
                self._folder = close_on_fork(_open_folder())
                self._replace(AcceptorState())
                self.path = str(folder() / incarnation)
                return
            self._folder.close()

    def write(self, acceptor: AcceptorState) -> None:
        """Replaces the record atomically.

        If the new record cannot be written, for example because the disk is full, the old record is
        removed. If this process then dies, the other members need a majority to continue. They must
        not read an outdated record, because two groups might then continue independently.

        Raises:
            OSError: the new record cannot be written, and the old one cannot be removed.
        """
        if not self.path:
            return
        try:
            self._replace(acceptor)
        except OSError as error:
            _unlink(self._folder.fileno(), self._name)
            logger.warning(
                f"this worker can no longer record its agreements in {self.path}: "
                f"{error.strerror}. If it dies, the others need a majority to continue. Free disk "
                "space."
            )
            self._close()

    def remove(self) -> None:
        """Removes the record when no other member needs the last word of this process."""
        remove(self.path)
        self._close()

    def _replace(self, acceptor: AcceptorState) -> None:
        place, new = self._folder.fileno(), self._name + _NEW
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(new, flags, 0o600, dir_fd=place), "w") as file:
            json.dump(encode_acceptor(acceptor), file)
        locked = close_on_fork(_open(place, new))
        try:
            # If the file system does not support locks, `sweep` fails too and removes nothing.
            with contextlib.suppress(OSError):
                fcntl.flock(locked.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.replace(new, self._name, src_dir_fd=place, dst_dir_fd=place)
        except BaseException:
            locked.close()
            raise
        self._file.close()  # release the old lock last, so that the record is always locked
        self._file = locked

    def _close(self) -> None:
        self.path = ""
        self._file.close()
        self._folder.close()


def read(path: str) -> AcceptorState | None:
    """Returns the last word of a dead process from its record; None if there is no valid record."""
    with (
        contextlib.suppress(OSError),
        _folder_of(path) as (place, name),
        contextlib.closing(_open(place, name)) as record,
    ):
        return _read(record)
    return None


def remove(path: str) -> None:
    """Removes the record of a dead process."""
    with contextlib.suppress(OSError), _folder_of(path) as (place, name):
        _unlink(place, name)
        os.rmdir(folder())  # fails if the folder still contains other records


def sweep(mine: ProcessIdentity) -> None:
    """Removes the records that earlier jobs have left behind on this machine.

    Args:
        mine: the identity of this process.
    """
    # Another process may remove the folder or a file at the same time.
    with contextlib.suppress(OSError), contextlib.closing(_open_folder()) as place:
        for name in os.listdir(place.fileno()):
            if _NAME.fullmatch(name.removesuffix(_NEW)):
                with contextlib.suppress(OSError):
                    _sweep(place.fileno(), name, mine)


def _sweep(place: int, name: str, mine: ProcessIdentity) -> None:
    """Removes one file if it is no longer needed.

    Raises:
        OSError: the process of the file is alive, or the file no longer exists.
    """
    with contextlib.closing(_open(place, name)) as record:
        status = os.fstat(record.fileno())
        age = time.time() - status.st_mtime
        if not stat.S_ISREG(status.st_mode) or age <= _CHANGE_SECONDS:
            return
        fcntl.flock(record.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(name, dir_fd=place, follow_symlinks=False).st_ino != status.st_ino:
            return  # the process has replaced the file
        known_dead = stat.S_IMODE(status.st_mode) == _KNOWN_DEAD
        stale = name.endswith(_NEW) or (known_dead and age > _STALE_SECONDS)
        if stale or _is_over(_read(record), mine):
            os.unlink(name, dir_fd=place)
        elif not known_dead:
            # A record is written only when the group changes, so it may be old although its process
            # has just died. Reset the time of the file, so that its age counts from now on.
            os.fchmod(record.fileno(), _KNOWN_DEAD)
            os.utime(record.fileno())


def _is_over(last_word: AcceptorState | None, mine: ProcessIdentity) -> bool:
    """Whether all members that might need this last word are known to be dead."""
    if last_word is None:
        return False
    accepted = last_word.accepted
    views = [last_word.view, last_word.excluded, accepted.view if accepted else None]
    places = [member.place for view in views if view for member in view.members]
    return bool(places) and all(is_visible(one, mine) and is_dead(one) for one in places)


def _open_folder() -> Descriptor:
    """Opens the folder that contains the records.

    Raises:
        OSError: the folder does not exist, or it is a symbolic link, or it is not private to this
            user.
    """
    path = folder()
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = Descriptor(os.open(path, flags))
    status = os.fstat(descriptor.fileno())
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        descriptor.close()
        raise PermissionError(errno.EPERM, "other users can write there", str(path))
    return descriptor


@contextlib.contextmanager
def _folder_of(path: str) -> Iterator[tuple[int, str]]:
    """Opens the folder of a record; yields the folder's descriptor and the name of the record.

    Args:
        path: the path of the record. Another process may have sent this path, so it is validated.

    Raises:
        OSError: the path is not the path of a record of this user.
    """
    parent, name = os.path.split(path)
    if parent != str(folder()) or not _NAME.fullmatch(name):
        raise FileNotFoundError(errno.ENOENT, "no record", path)
    with contextlib.closing(_open_folder()) as place:
        yield place.fileno(), name


def _open(place: int, name: str) -> Descriptor:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return Descriptor(os.open(name, flags, dir_fd=place))


def _read(record: Descriptor) -> AcceptorState | None:
    """Reads an open record; returns None if its content is invalid."""
    try:
        with open(record.fileno(), closefd=False) as file:
            return decode_acceptor(json.load(file))
    except (OSError, ValueError, WireError):
        return None


def _unlink(place: int, name: str) -> None:
    for one in (name, name + _NEW):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(one, dir_fd=place)
