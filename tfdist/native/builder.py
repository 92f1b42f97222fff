"""Finds a build that fits, or makes one: once, while other processes wait."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path

from tfdist.errors import NativeUnavailableError
from tfdist.native import build as builds
from tfdist.native import compiler as compilers
from tfdist.native import lock, recipe, store, tensorflow_package
from tfdist.native.build import Build
from tfdist.native.compiler import Compiler
from tfdist.native.console import say
from tfdist.native.recipe import SOURCE, Recipe
from tfdist.options import NativeOptions

# For so long a failure is taken as the answer: the workers of a job would all fail alike.
_FAILURE_SECONDS = 60.0


def ensure(
    options: NativeOptions,
    source: Path = SOURCE,
    *,
    rejected: Collection[str] = (),
    force: bool = False,
    retry: bool = False,
    package: Path | None = None,
    announce: Callable[[str], object] = say,
    seconds: float = lock.SECONDS,
) -> Build:
    """Finds a build, or makes one.

    Args:
        options: the compiler and the cache.
        source: the folder with the C++ sources.
        rejected: stamps of builds that did not load.
        force: whether to compile although there is a build.
        retry: whether to compile although that has failed a moment ago.
        package: the folder to look in and to compile into instead of the cache.
        announce: takes lines on what is going on; stderr by default.
        seconds: how long to wait for another process that compiles.

    Returns:
        The build.

    Raises:
        NativeUnavailableError: there is none, and it cannot be compiled.
    """
    began = time.time()
    what = recipe.read(tensorflow_package.find(), source)
    compiler = _compiler(options)
    if not force and (build := _find(what, compiler, options, rejected, package)):
        return build
    if compiler is None:
        compiler = compilers.find(options.compiler)  # Raises, with the reason.
    if package:
        root = store.writable_package(package)
    else:
        root = store.writable_cache(options, announce)
    target = root / store.name(what, compiler)
    log = root / f"{target.name}.log"
    with lock.held(root / store.LOCK, seconds, announce):
        build = builds.read(target)
        if build and build.stamp not in rejected and (not force or build.finished >= began):
            return build
        if not retry:
            _raise_if_failed(log, began - _FAILURE_SECONDS)
        _make(what, compiler, target, log, announce)
    build = builds.read(target)
    if build is None:
        raise NativeUnavailableError(
            f"The native collectives have vanished from {target}: try again, and see what removes "
            f"them there."
        )
    return build


def find(options: NativeOptions, source: Path = SOURCE) -> Build | None:
    """Looks for a build without making one.

    Raises:
        NativeUnavailableError: TensorFlow or the sources are missing.
    """
    what = recipe.read(tensorflow_package.find(), source)
    return _find(what, _compiler(options), options, (), None)


def clean(
    options: NativeOptions,
    keep: Build,
    *,
    package: Path | None = None,
    announce: Callable[[str], object] = say,
) -> list[Path]:
    """Removes all builds but one, and what failed ones left.

    Args:
        options: the cache.
        keep: what stays.
        package: the folder to clean instead of the cache.
        announce: takes lines on what is going on; stderr by default.

    Returns:
        The folders that are gone.
    """
    removed = []
    for root in [package] if package else store.caches(options):
        if root.is_dir():
            with lock.held(root / store.LOCK, lock.SECONDS, announce):
                removed += store.clean(root, keep)
    return removed


def _compiler(options: NativeOptions) -> Compiler | None:
    try:
        return compilers.find(options.compiler)
    except NativeUnavailableError:
        return None  # A build from another machine does without.


def _find(
    what: Recipe,
    compiler: Compiler | None,
    options: NativeOptions,
    rejected: Collection[str],
    package: Path | None,
) -> Build | None:
    caches = [] if package else store.caches(options)
    return store.find(what, compiler, caches, [package or store.PACKAGE], rejected)


def _make(
    what: Recipe, compiler: Compiler, target: Path, log: Path, announce: Callable[[str], object]
) -> None:
    # Here, because most processes find a build and need no threads to make one.
    from tfdist.native.compilation import CompilationError, compile_into

    announce("compiling the native collectives (once for this machine) ...")
    start = time.monotonic()
    folder = store.unfinished(target.parent)
    try:
        (folder / "build.log").write_text(compile_into(folder, what, compiler))
        seconds = time.monotonic() - start
        builds.write(folder, what, compiler, seconds)
        store.put(folder, target)
        log.unlink(missing_ok=True)
    except CompilationError as error:
        message = (
            f"The native collectives could not be compiled with {compiler} for TensorFlow "
            f"{what.tensorflow.version}. Full log: {log}. Set CXX to another compiler, or "
            f"TFDIST_NATIVE=0 to do without. The compiler's words:\n{error.shown}"
        )
        with contextlib.suppress(OSError):
            log.write_text(f"{message}\n\n{error.log}")
        raise NativeUnavailableError(message) from error
    except OSError as error:
        raise NativeUnavailableError(
            f"The native collectives could not be written to {target.parent}: {error}. Make "
            f"room there, or set TFDIST_CACHE to another folder."
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    announce(f"compiled the native collectives in {seconds:.1f} s ({compiler})")


def _raise_if_failed(log: Path, since: float) -> None:
    """Raises what another process has found out meanwhile."""
    with contextlib.suppress(OSError):
        if log.stat().st_mtime >= since:
            raise NativeUnavailableError(log.read_text(errors="replace").partition("\n\n")[0])
