"""Manages the directories that contain builds, their locks, and their security.

A cache is used only if no other user can put libraries there, because a library's code runs when it
is loaded.
"""

import contextlib
import fcntl
import grp
import os
import pwd
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from tfdist._src.native import compilation
from tfdist._src.native.compilation import Build, Compiler, Recipe
from tfdist._src.options import NativeOptions
from tfdist.errors import NativeUnavailableError


def writable_by_others(folder: Path) -> str | None:
    """Returns the reason why other users can change the contents of a directory, if they can.

    Another user can change the contents by writing to the directory. Another user can also replace
    the directory by writing to a directory above it, unless that directory has the sticky bit, like
    /tmp.

    Args:
        folder: an existing directory.

    Returns:
        The reason; None if only the current user and root can change the contents.

    Example:
        >>> import tempfile
        >>> writable_by_others(Path(tempfile.mkdtemp())) is None
        True
    """
    path = Path(os.path.abspath(folder))
    for link in (path, *path.parents):
        if link.is_symlink() and link.lstat().st_uid not in (os.getuid(), 0):
            return f"the link {link} belongs to {_user(link.lstat().st_uid)}"
    folder = path.resolve()
    # Also check the directories above a link, because a user who can write there could replace the
    # link.
    above = {place.resolve() for place in (*path.parents, *folder.parents)}
    for place in (folder, *sorted(above, reverse=True)):
        status = place.stat()
        if status.st_uid not in (os.getuid(), 0):
            return f"{place} belongs to {_user(status.st_uid)}"
        if place != folder and status.st_mode & stat.S_ISVTX:
            continue
        if status.st_mode & stat.S_IWOTH:
            return f"everyone can write to {place}"
        if status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid):
            return f"the group {_group(status.st_gid)} can write to {place}"
    return None


def _is_own_group(gid: int) -> bool:
    """Whether a group belongs to the current user or root, and has no other members.

    Many systems create a group for each user, with the same name. The name of the group must be the
    user's name, because the list of members is not sufficient. It need not contain users for whom
    this is the primary group.
    """
    try:
        group = grp.getgrgid(gid)
        mine = {pwd.getpwuid(os.getuid()).pw_name, "root"}
        return group.gr_name in mine and set(group.gr_mem) <= mine
    # The user or group has no name on this host, for example if a directory service does not
    # provide it.
    except KeyError:
        return gid == 0


def _user(uid: int) -> str:
    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"the user {uid}"


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


SECONDS = 900.0
_FIRST_SECONDS = 2.0
_EVERY_SECONDS = 10.0
_POLL_SECONDS = 0.05


@contextlib.contextmanager
def held(path: Path, seconds: float, announce: Callable[[str], object]) -> Iterator[None]:
    """Holds a lock within this context.

    If this process dies, the operating system releases the lock.

    Args:
        path: the path of the lock file. The file is created if it does not exist, and is never
            removed. It contains a description of the last process that held the lock.
        seconds: the time limit for waiting while another process holds the lock.
        announce: a function that periodically receives a message about the process that holds the
            lock.

    Raises:
        NativeUnavailableError: another process still holds the lock after `seconds`.
        OSError: the lock file cannot be created.
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
            # The file system does not support locks, so several processes may compile the same
            # libraries. Each process moves its result into place atomically, and no process sees an
            # incomplete build.
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


# `tfdist build --into-package` writes builds to this directory. Wheels that are built afterward
# include them.
PACKAGE = Path(__file__).parent / "prebuilt"
LOCK = "lock"
_UNFINISHED = ".unfinished-"
_ABANDONED_SECONDS = 3600.0
_LOG = re.compile(r"[0-9a-f]{16}-[0-9a-f]{8}\.log")


def name(recipe: Recipe, compiler: Compiler) -> str:
    """Returns the name of the directory for a build."""
    return f"{recipe.key}-{compiler.key}"


def find(
    recipe: Recipe,
    compiler: Compiler | None,
    caches: Collection[Path],
    packages: Collection[Path],
    rejected: Collection[str] = (),
) -> Build | None:
    """Finds a build that was compiled from the same sources and can be loaded on this host.

    Args:
        recipe: the sources and flags from which the libraries must have been compiled.
        compiler: the compiler of this host; None if there is none.
        caches: the directories to search first. If `compiler` is given, only its builds are found
            in these directories.
        packages: the directories to search next. In these, the builds of all compilers are found.
        rejected: the stamps of builds that could not be loaded, so that they are not returned
            again.
    """
    for folder in _candidates(recipe, compiler, caches, packages):
        # If another user can write to the directory, that user may have put the build there. The
        # package need not be checked, because a user who can write there can also change tfdist
        # itself.
        if folder.parent in caches and not is_safe(folder):
            continue
        build = compilation.read_build(folder)
        if build and build.runs_here() and build.stamp not in rejected:
            return build
    return None


def _candidates(
    recipe: Recipe,
    compiler: Compiler | None,
    caches: Collection[Path],
    packages: Collection[Path],
) -> Iterator[Path]:
    for root in caches:
        if compiler:
            yield root / name(recipe, compiler)
        else:
            yield from sorted(root.glob(f"{recipe.key}-*"))
    for root in packages:
        yield from sorted(root.glob(f"{recipe.key}-*"))


def caches(options: NativeOptions) -> list[Path]:
    """Returns the existing directories in which builds of this host may be cached."""
    cache = [options.cache / "native"] if options.cache else []
    return [folder for folder in (*cache, _temporary()) if is_safe(folder)]


def writable_cache(options: NativeOptions, announce: Callable[[str], object]) -> Path:
    """Returns a directory in which to store new builds, and creates it if necessary.

    Args:
        options: the settings, which contain the path of the cache.
        announce: a function that receives a warning if the cache cannot be used, so that a
            temporary directory is used instead.

    Raises:
        NativeUnavailableError: neither the cache nor a temporary directory is writable.
    """
    problem = "there is no home directory"
    if options.cache:
        root = options.cache / "native"
        try:
            _writable(root)
            insecure = writable_by_others(root)
            if insecure is None:
                return root
            problem = f"{insecure}, so the contents of {root} cannot be trusted"
        except OSError as error:
            problem = f"{root} cannot be written ({error.strerror})"
    temporary = _temporary()
    try:
        temporary.mkdir(mode=0o700, exist_ok=True)
        if not is_safe(temporary):
            temporary = Path(tempfile.mkdtemp(prefix="tfdist-"))
        _writable(temporary)
    except OSError as error:
        raise NativeUnavailableError(
            f"No writable directory for the native collectives: {problem}, and {temporary} cannot "
            f"be written ({error.strerror}). Set TFDIST_CACHE to a writable directory."
        ) from error
    announce(
        f"warning: {problem}, so the native collectives are compiled into {temporary}; set "
        f"TFDIST_CACHE to a persistent directory"
    )
    return temporary


def writable_package(root: Path = PACKAGE) -> Path:
    """Checks that a directory in the package is writable, and returns it.

    Raises:
        NativeUnavailableError: the directory is not writable.
    """
    try:
        return _writable(root)
    except OSError as error:
        raise NativeUnavailableError(
            f"{root} cannot be written ({error.strerror}): run this as the user who "
            f"installed tfdist."
        ) from error


def unfinished(root: Path) -> Path:
    """Creates a directory for a compilation, next to the builds.

    Also removes such directories that earlier processes have left behind.
    """
    _remove_abandoned(root)
    folder = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=root))
    # Other users must be able to load the libraries, for example if root compiles them in an image.
    folder.chmod(0o755)
    return folder


def put(folder: Path, target: Path) -> None:
    """Moves a finished build to the directory `target`, and replaces an existing build there."""
    if not target.exists():
        folder.rename(target)
        return
    # A rename cannot replace a directory that is not empty, so the existing one is moved first.
    # Processes that have loaded its libraries can continue to use them.
    aside = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=target.parent))
    target.rename(aside / target.name)
    folder.rename(target)
    _remove(aside)


def clean(root: Path, keep: Build) -> list[Path]:
    """Removes all builds except one, and the remains of failed compilations.

    The caller must hold the lock of the directory.

    Args:
        root: the directory that contains the builds.
        keep: the build that is not removed.

    Returns:
        The directories of the removed builds.
    """
    removed = []
    _remove_abandoned(root)
    for entry in root.iterdir():
        if _LOG.fullmatch(entry.name):
            entry.unlink(missing_ok=True)
        elif (entry / compilation.MANIFEST).exists() and not entry.samefile(keep.folder):
            _remove(entry)
            removed.append(entry)
    return removed


def _remove_abandoned(root: Path) -> None:
    # If the file system does not support locks, another process may still use a recent directory.
    for entry in root.glob(f"{_UNFINISHED}*"):
        with contextlib.suppress(OSError):
            if entry.stat().st_mtime < time.time() - _ABANDONED_SECONDS:
                _remove(entry)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _writable(root: Path) -> Path:
    if not root.is_dir():
        root.parent.mkdir(parents=True, exist_ok=True)
        root.mkdir(mode=0o755, exist_ok=True)
        root.chmod(0o755)  # sets these permissions regardless of the umask
    with tempfile.TemporaryFile(dir=root):
        return root


def _temporary() -> Path:
    return Path(tempfile.gettempdir()) / f"tfdist-{os.getuid()}"


def is_safe(folder: Path) -> bool:
    """Whether a directory exists, is not a link, and can be changed only by this user and root."""
    with contextlib.suppress(OSError):
        return not folder.is_symlink() and folder.is_dir() and writable_by_others(folder) is None
    return False
