"""Finds compiled libraries, or compiles them while other processes wait."""

import contextlib
import shutil
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from tfdist._src.log import logger
from tfdist._src.native import compilation, gpu_kernels, store
from tfdist._src.native.compilation import SOURCE, Build, Compiler, Recipe
from tfdist._src.options import NativeOptions
from tfdist.errors import NativeUnavailableError

# If a compilation fails, no process tries again for this number of seconds, because the compilation
# would fail on all workers of a job in the same way.
_FAILURE_SECONDS = 60.0


def ensure(
    options: NativeOptions,
    source: Path = SOURCE,
    *,
    rejected: Collection[str] = (),
    force: bool = False,
    retry: bool = False,
    package: Path | None = None,
    announce: Callable[[str], object] = logger.info,
    seconds: float = store.SECONDS,
) -> Build:
    """Finds a build that this host can load, or compiles one.

    Args:
        options: the settings, which contain the compiler and the path of the cache.
        source: the directory with the C++ sources.
        rejected: the stamps of builds that could not be loaded, so that they are not returned
            again.
        force: whether to compile the libraries even if a build exists.
        retry: whether to compile the libraries even if a compilation has failed recently.
        package: a directory to use instead of the cache, both to find and to store builds.
        announce: a function that receives messages about the progress. By default, these are
            logged.
        seconds: the time limit for waiting while another process compiles the libraries.

    Returns:
        The build.

    Raises:
        NativeUnavailableError: there is no build that can be used, and none can be compiled.
    """
    start = time.time()
    wanted = compilation.read_recipe(compilation.find_tensorflow(), source)
    compiler = _compiler(options)
    if not force and (build := _find(wanted, compiler, options, rejected, package)):
        return build
    if compiler is None:
        compiler = compilation.find_compiler(options.compiler)  # Raises an error with the reason.
    if package:
        root = store.writable_package(package)
    else:
        root = store.writable_cache(options, announce)
    target = root / store.name(wanted, compiler)
    log = root / f"{target.name}.log"
    with store.held(root / store.LOCK, seconds, announce):
        build = compilation.read_build(target)
        known = build and build.stamp not in rejected and (package or store.is_safe(target))
        if build and known and (not force or build.finished >= start):
            return build
        if not retry:
            _raise_if_failed(log, start - _FAILURE_SECONDS)
        _make(wanted, compiler, target, log, announce)
    build = compilation.read_build(target)
    if build is None:
        raise NativeUnavailableError(
            f"The native collectives were deleted from {target}: try again, and find out what "
            f"removes them."
        )
    return build


def find(options: NativeOptions, source: Path = SOURCE) -> Build | None:
    """Finds a build without compiling one.

    Raises:
        NativeUnavailableError: TensorFlow or the sources are missing.
    """
    wanted = compilation.read_recipe(compilation.find_tensorflow(), source)
    return _find(wanted, _compiler(options), options, (), None)


def clean(
    options: NativeOptions,
    keep: Build,
    *,
    package: Path | None = None,
    announce: Callable[[str], object] = logger.info,
) -> list[Path]:
    """Removes all builds except one, remains of failed compilations, and outdated GPU kernels.

    Args:
        options: the settings, which contain the path of the cache.
        keep: the build that is not removed.
        package: a directory to clean instead of the cache.
        announce: a function that receives messages about the progress. By default, these are
            logged.

    Returns:
        The removed directories.
    """
    removed = []
    for root in [package] if package else store.caches(options):
        if root.is_dir():
            with store.held(root / store.LOCK, store.SECONDS, announce):
                removed += [*store.clean(root, keep), *gpu_kernels.clean(root)]
    return removed


def _compiler(options: NativeOptions) -> Compiler | None:
    try:
        return compilation.find_compiler(options.compiler)
    except NativeUnavailableError:
        return None  # A compiler is not needed if a build is found.


def _find(
    wanted: Recipe,
    compiler: Compiler | None,
    options: NativeOptions,
    rejected: Collection[str],
    package: Path | None,
) -> Build | None:
    caches = [] if package else store.caches(options)
    return store.find(wanted, compiler, caches, [package or store.PACKAGE], rejected)


def _make(
    wanted: Recipe, compiler: Compiler, target: Path, log: Path, announce: Callable[[str], object]
) -> None:
    # Imported here because these names are rarely needed: most processes find a build.
    from tfdist._src.native.compilation import CompilationError, compile_into

    announce("compiling the native collectives (once per host) ...")
    start = time.monotonic()
    folder = store.unfinished(target.parent)
    try:
        (folder / "build.log").write_text(compile_into(folder, wanted, compiler))
        seconds = time.monotonic() - start
        compilation.write(folder, wanted, compiler, seconds)
        store.put(folder, target)
        log.unlink(missing_ok=True)
    except CompilationError as error:
        message = (
            f"The native collectives could not be compiled with {compiler} for TensorFlow "
            f"{wanted.tensorflow.version}. Full log: {log}. Set CXX to another compiler, or "
            f"TFDIST_NATIVE=0 to disable them. Compiler output:\n{error.shown}"
        )
        with contextlib.suppress(OSError):
            log.unlink(missing_ok=True)  # if `log` is a link, replaces the link and not its target
            log.write_text(f"{message}\n\n{error.log}")
        raise NativeUnavailableError(message) from error
    except OSError as error:
        raise NativeUnavailableError(
            f"The native collectives could not be written to {target.parent}: {error}. Free "
            f"space there, or set TFDIST_CACHE to another directory."
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    announce(f"compiled the native collectives in {seconds:.1f} s ({compiler})")


def _raise_if_failed(log: Path, since: float) -> None:
    """Raises an error if this or another process has failed to compile since a given time."""
    with contextlib.suppress(OSError):
        if log.stat().st_mtime >= since:
            raise NativeUnavailableError(log.read_text(errors="replace").partition("\n\n")[0])


@dataclass(frozen=True)
class Status:
    """Describes whether the native collectives can be used in this process.

    Attributes:
        enabled: whether the settings allow the use of the native collectives.
        build: the build that would be loaded; None if the libraries are not compiled yet.
        compiler: the name and version of the compiler that would be used; "" if no compilation is
            needed or possible.
        problem: the reason why the libraries can be neither loaded nor compiled, and what to do
            about it; "" if there is no such problem.
    """

    enabled: bool
    build: Build | None = None
    compiler: str = ""
    problem: str = ""

    def __str__(self) -> str:
        """Describes the status in one line.

        Example:
            >>> str(Status(True, compiler="g++ 12.2.0"))
            'not compiled yet; will be compiled on first use by g++ 12.2.0'
        """
        if not self.enabled:
            return "switched off by TFDIST_NATIVE=0"
        if self.build:
            return f"compiled: {self.build.folder} ({self.build.compiler})"
        if self.problem:
            return "unavailable"
        return f"not compiled yet; will be compiled on first use by {self.compiler}"


def status(options: NativeOptions | None = None, source: Path = SOURCE) -> Status:
    """Finds out which build would be loaded, or why none can be loaded.

    Args:
        options: the settings, which contain the compiler and the path of the cache. By default,
            they are read from the environment.
        source: the directory with the C++ sources.

    Raises:
        ValueError: a setting is invalid.
    """
    options = options or NativeOptions.from_environment()
    if not options.enabled:
        return Status(enabled=False)
    try:
        build = find(options, source)
        compiler = "" if build else str(compilation.find_compiler(options.compiler))
    except NativeUnavailableError as error:
        return Status(enabled=True, problem=str(error))
    return Status(enabled=True, build=build, compiler=compiler)
