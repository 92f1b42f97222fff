"""The directories of builds, their locks, and checks of their owners."""

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
    """The reason why other users can change the contents of a directory.

    Another user can change the contents by writing to the directory or by replacing it. A user can
    replace it by writing to a directory above it, unless that directory is sticky, as /tmp is.

    Args:
        folder: an existing directory.

    Returns:
        The reason; None if only this user and root can change the contents.

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
    # Includes the directories above a link, because the link could be replaced there.
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
    """Whether a group is root's or this user's own, and has no other members.

    Many systems create a group with each user's name. The name must match because the list of
    members may be incomplete: it need not contain users with this primary group.
    """
    try:
        group = grp.getgrgid(gid)
        mine = {pwd.getpwuid(os.getuid()).pw_name, "root"}
        return group.gr_name in mine and set(group.gr_mem) <= mine
    except KeyError:  # The user is unknown here, as with some directory services.
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
    """Holds a lock while compiling; the system releases it if this process dies.

    Args:
        path: the lock file, created if missing and never removed; it names the last holder.
        seconds: how long to wait for another process.
        announce: periodically receives a message that names the holder.

    Raises:
        NativeUnavailableError: another process still holds the lock after `seconds`.
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
            # The file system has no locks. Several processes may then compile the same build; each
            # moves its result into place atomically, so that no process sees a partial build.
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


# The target of `tfdist build --into-package`; wheels built afterward include it.
PACKAGE = Path(__file__).parent / "prebuilt"
LOCK = "lock"
_UNFINISHED = ".unfinished-"
_ABANDONED_SECONDS = 3600.0
_LOG = re.compile(r"[0-9a-f]{16}-[0-9a-f]{8}\.log")


def name(recipe: Recipe, compiler: Compiler) -> str:
    """The name of a build's directory."""
    return f"{recipe.key}-{compiler.key}"


def find(
    recipe: Recipe,
    compiler: Compiler | None,
    caches: Collection[Path],
    packages: Collection[Path],
    rejected: Collection[str] = (),
) -> Build | None:
    """Finds a compatible build.

    Args:
        recipe: the sources and flags.
        compiler: this host's compiler; None if there is none.
        caches: the directories to search first, for builds of `compiler` if there is one.
        packages: the directories to search next, for builds of any compiler.
        rejected: stamps of builds that did not load.
    """
    for folder in _candidates(recipe, compiler, caches, packages):
        # Another user who could once write to the cache may have put the build there. The package
        # needs no such check: a user who can write there can change tfdist itself.
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
    """The directories that may contain builds of this host, without creating any."""
    cache = [options.cache / "native"] if options.cache else []
    return [folder for folder in (*cache, _temporary()) if is_safe(folder)]


def writable_cache(options: NativeOptions, announce: Callable[[str], object]) -> Path:
    """The directory to compile into, created if missing.

    Args:
        options: the settings; they contain the path of the cache.
        announce: receives a warning if the cache is not writable.

    Raises:
        NativeUnavailableError: the temporary directory is not writable either.
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
    """The directory in the package to compile into.

    Raises:
        NativeUnavailableError: it is not writable.
    """
    try:
        return _writable(root)
    except OSError as error:
        raise NativeUnavailableError(
            f"{root} cannot be written ({error.strerror}): run this as the user who "
            f"installed tfdist."
        ) from error


def unfinished(root: Path) -> Path:
    """Creates a directory to compile into, next to the builds; removes abandoned directories."""
    _remove_abandoned(root)
    folder = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=root))
    # Other users may load libraries compiled by one user, such as root in an image.
    folder.chmod(0o755)
    return folder


def put(folder: Path, target: Path) -> None:
    """Moves a finished directory into place, replacing an existing one."""
    if not target.exists():
        folder.rename(target)
        return
    # A non-empty directory cannot be replaced by a rename. Processes that have loaded the old
    # libraries keep them.
    aside = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=target.parent))
    target.rename(aside / target.name)
    folder.rename(target)
    _remove(aside)


def clean(root: Path, keep: Build) -> list[Path]:
    """Removes other builds and the remains of failed ones; the caller must hold the lock.

    Returns:
        The removed builds.
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
    # If the file system has no locks, another process may still use a recent directory.
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
        root.chmod(0o755)  # regardless of the umask
    with tempfile.TemporaryFile(dir=root):
        return root


def _temporary() -> Path:
    return Path(tempfile.gettempdir()) / f"tfdist-{os.getuid()}"


def is_safe(folder: Path) -> bool:
    """Whether a directory exists, and no other user can have put libraries there."""
    with contextlib.suppress(OSError):
        return not folder.is_symlink() and folder.is_dir() and writable_by_others(folder) is None
    return False
