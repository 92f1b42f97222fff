"""The folders that builds are kept in: the package's own, the user's cache, a temporary one."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from tfdist.errors import NativeUnavailableError
from tfdist.native import build as builds
from tfdist.native.build import Build
from tfdist.native.compiler import Compiler
from tfdist.native.recipe import Recipe
from tfdist.options import NativeOptions

# What `tfdist build --into-package` makes; wheels built after that contain it.
PACKAGE = Path(__file__).parent / "prebuilt"
LOCK = "lock"
_UNFINISHED = ".unfinished-"
_ABANDONED_SECONDS = 3600.0
_LOG = re.compile(r"[0-9a-f]{16}-[0-9a-f]{8}\.log")


def name(recipe: Recipe, compiler: Compiler) -> str:
    """The name of a build's folder."""
    return f"{recipe.key}-{compiler.key}"


def find(
    recipe: Recipe,
    compiler: Compiler | None,
    caches: Collection[Path],
    packages: Collection[Path],
    rejected: Collection[str] = (),
) -> Build | None:
    """Looks for a build that fits.

    Args:
        recipe: what it is to be made from.
        compiler: this machine's compiler, which what was compiled here has to be made with, so
            that another one starts anew; None if it has none.
        caches: where to look first.
        packages: where to look then. What came with the package may be from another compiler.
        rejected: stamps of builds that did not load.
    """
    for folder in _candidates(recipe, compiler, caches, packages):
        build = builds.read(folder)
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
    """The folders that may hold what this machine has compiled; nothing is made."""
    temporary = _temporary()
    own = [options.cache / "native"] if options.cache else []
    return [*own, temporary] if _is_mine(temporary) else own


def writable_cache(options: NativeOptions, announce: Callable[[str], object]) -> Path:
    """The folder to compile into, made if it is missing.

    Args:
        options: names it.
        announce: takes a warning if it cannot be written.

    Raises:
        NativeUnavailableError: the temporary folder cannot be written either.
    """
    problem = "there is no home folder"
    if options.cache:
        root = options.cache / "native"
        try:
            return _writable(root)
        except OSError as error:
            problem = f"{root} cannot be written ({error.strerror})"
    temporary = _temporary()
    try:
        temporary.mkdir(mode=0o700, exist_ok=True)
        if not _is_mine(temporary):
            temporary = Path(tempfile.mkdtemp(prefix="tfdist-"))
        _writable(temporary)
    except OSError as error:
        raise NativeUnavailableError(
            f"There is no folder for the native collectives: {problem}, nor {temporary} "
            f"({error.strerror}). Set TFDIST_CACHE to one that can be written."
        ) from error
    announce(
        f"warning: {problem}, so the native collectives are compiled into {temporary}; set "
        f"TFDIST_CACHE to a folder that stays"
    )
    return temporary


def writable_package(root: Path = PACKAGE) -> Path:
    """The package's own folder, to compile into.

    Raises:
        NativeUnavailableError: it cannot be written.
    """
    try:
        return _writable(root)
    except OSError as error:
        raise NativeUnavailableError(
            f"{root} cannot be written ({error.strerror}): run this as the user who has "
            f"installed tfdist."
        ) from error


def unfinished(root: Path) -> Path:
    """A new folder beside the builds, to compile into; what killed processes left goes away."""
    _remove_abandoned(root)
    folder = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=root))
    # Other users may load what one user, such as an image's root, has compiled.
    folder.chmod(0o755)
    return folder


def put(folder: Path, target: Path) -> None:
    """Moves a finished folder into its place, at once; what was there goes away."""
    if not target.exists():
        folder.rename(target)
        return
    # A folder that is not empty cannot be renamed over. Processes that have loaded the old
    # libraries keep them.
    aside = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=target.parent))
    target.rename(aside / target.name)
    folder.rename(target)
    _remove(aside)


def clean(root: Path, keep: Build) -> list[Path]:
    """Removes other builds and what failed ones left; who calls it holds the lock.

    Returns:
        The builds that are gone.
    """
    removed = []
    _remove_abandoned(root)
    for entry in root.iterdir():
        if _LOG.fullmatch(entry.name):
            entry.unlink(missing_ok=True)
        elif (entry / builds.MANIFEST).exists() and not entry.samefile(keep.folder):
            _remove(entry)
            removed.append(entry)
    return removed


def _remove_abandoned(root: Path) -> None:
    # Younger ones may be in use where the file system has no locks.
    for left in root.glob(f"{_UNFINISHED}*"):
        with contextlib.suppress(OSError):
            if left.stat().st_mtime < time.time() - _ABANDONED_SECONDS:
                _remove(left)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _writable(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=root):
        return root


def _temporary() -> Path:
    return Path(tempfile.gettempdir()) / f"tfdist-{os.getuid()}"


def _is_mine(folder: Path) -> bool:
    """Whether nobody else can have put libraries there; the name can be guessed."""
    with contextlib.suppress(OSError):
        status = folder.lstat()
        return (
            stat.S_ISDIR(status.st_mode)
            and status.st_uid == os.getuid()
            and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        )
    return False
