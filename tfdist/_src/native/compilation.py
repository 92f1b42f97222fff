"""The sources, flags and commands that make the two libraries, and the resulting build.

This module does not import TensorFlow, which takes seconds: the launcher builds before its workers
start. A test compares the flags with the flags of `tf.sysconfig`.
"""

import hashlib
import importlib.util
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from tfdist._src.options import environment_of_programs
from tfdist.errors import NativeUnavailableError

# The same in all supported versions of TensorFlow. With other values, the ops would not load:
# symbol names depend on the first macro, and TensorFlow's build sets the second one on every
# processor.
_DEFINES = ("-D_GLIBCXX_USE_CXX11_ABI=1", "-DEIGEN_MAX_ALIGN_BYTES=64")
_FRAMEWORK = "libtensorflow_framework.so.2"
# Distributions that contain the package `tensorflow`, unlike its companions (tensorflow_hub).
_METADATA = re.compile(
    r"(?:tensorflow|tensorflow_cpu|tensorflow_gpu|tensorflow_intel|tensorflow_cpu_aws"
    r"|tensorflow_rocm|intel_tensorflow|tf_nightly|tf_nightly_cpu)-(?P<version>[^-]+)"
    r"\.(?:dist|egg)-info"
)


@dataclass(frozen=True)
class TensorFlowPackage:
    """The installed TensorFlow.

    Attributes:
        folder: the directory with its headers and libraries.
        version: the version of its distribution.
    """

    folder: Path
    version: str

    @property
    def defines(self) -> tuple[str, ...]:
        """The macros that must be defined to compile code that includes its headers."""
        return _DEFINES

    @property
    def includes(self) -> tuple[str, ...]:
        """The include flags; the headers count as system headers, to suppress their warnings."""
        return ("-isystem", str(self.folder / "include"))

    @property
    def link_flags(self) -> tuple[str, ...]:
        """The flags to link ops with."""
        return (f"-L{self.folder}", f"-l:{_FRAMEWORK}")


def find_tensorflow() -> TensorFlowPackage:
    """Finds the TensorFlow that `import tensorflow` would import.

    Raises:
        NativeUnavailableError: it is missing or incomplete.

    Example:
        >>> find_tensorflow().version  # doctest: +SKIP
        '2.21.0'
    """
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or spec.origin is None:
        raise NativeUnavailableError(
            "TensorFlow is not installed for this Python: pip install tensorflow."
        )
    folder = Path(spec.origin).parent
    framework = folder / _FRAMEWORK
    if not framework.exists():
        raise NativeUnavailableError(
            f"The TensorFlow in {folder} has no {_FRAMEWORK}: reinstall it with pip."
        )
    versions = sorted(
        match["version"]
        for entry in folder.parent.iterdir()
        if (match := _METADATA.fullmatch(entry.name))
    )
    # A TensorFlow without metadata is identified by the size of its library.
    return TensorFlowPackage(folder, "+".join(versions) or f"unknown-{framework.stat().st_size}")


SOURCE = Path(__file__).parents[2] / "csrc"
CORE = "libtfdist_core.so"
OPS = "libtfdist_ops.so"

# Never -march=native: one home directory, image or wheel serves hosts with different processors.
# Code that needs newer instructions enables them per function. TensorFlow itself is built with
# NDEBUG, which affects its headers.
_COMPILE = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-DNDEBUG", "-Wall", "-Wextra")
# No code reads the floating-point exception flags or errno. If the compiler need not set them, it
# can vectorize branches. A product is rounded before it is added (no fused multiply-add), so that
# all processors compute the same bits.
ARITHMETIC = ("-fno-trapping-math", "-fno-math-errno", "-ffp-contract=off")
_HARDENING = ("-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2")
_FLAGS = (*_COMPILE, *ARITHMETIC, *_HARDENING)
_LINK = ("-shared", "-pthread", "-Wl,-z,relro", "-Wl,-z,now")
# `-z defs` reports undefined symbols of the core when it is linked, not when it is loaded. Before
# glibc 2.34, dlopen is in libdl.
_LINK_CORE = ("-Wl,-z,defs", f"-Wl,-soname,{CORE}", "-ldl")
_LINK_OPS = (f"-Wl,-soname,{OPS}", f"-l:{CORE}", "-Wl,-rpath,$ORIGIN")
_SUFFIXES = (".cc", ".h", ".inc")
_OPS_FOLDER = "tf"


@dataclass(frozen=True)
class Recipe:
    """Sources and flags of the core, and of the ops that expose it to TensorFlow graphs.

    Attributes:
        source: the directory with the sources.
        core: the core's translation units, relative to `source`.
        ops: the translation units of the ops; empty if there are none.
        tensorflow: the TensorFlow to compile against.
        key: 16 characters that change with anything that affects the libraries, except the
            compiler.
    """

    source: Path
    core: tuple[str, ...]
    ops: tuple[str, ...]
    tensorflow: TensorFlowPackage
    key: str

    @property
    def compile_core(self) -> tuple[str, ...]:
        """Compile flags of the core."""
        # The ops use C++ symbols of the core, so both need the same ABI.
        return (*_FLAGS, *self.tensorflow.defines, f"-I{self.source}")

    @property
    def compile_ops(self) -> tuple[str, ...]:
        """Compile flags of the ops."""
        return (*self.compile_core, *self.tensorflow.includes)

    @property
    def link_core(self) -> tuple[str, ...]:
        """Link flags of the core, which follow its object files in the command."""
        return (*_LINK, *_LINK_CORE)

    @property
    def link_ops(self) -> tuple[str, ...]:
        """Link flags of the ops, which follow their object files.

        The linker runs in the directory that contains the core.
        """
        return (*_LINK, "-L.", *_LINK_OPS, *self.tensorflow.link_flags)


def read_recipe(tensorflow: TensorFlowPackage, source: Path = SOURCE) -> Recipe:
    """Reads the sources.

    Args:
        tensorflow: the TensorFlow to compile against.
        source: the directory with the sources: the ops in its subdirectory `tf`, the core in all
            others.

    Raises:
        NativeUnavailableError: the sources are missing.
    """
    found = (path for path in source.rglob("*") if path.suffix in _SUFFIXES)
    files = sorted(path.relative_to(source) for path in found)
    units = [path for path in files if path.suffix == ".cc"]
    ops = tuple(str(path) for path in units if path.parts[0] == _OPS_FOLDER)
    core = tuple(str(path) for path in units if path.parts[0] != _OPS_FOLDER)
    if not core:
        raise NativeUnavailableError(f"The C++ sources are missing in {source}: reinstall tfdist.")
    digest = hashlib.sha256()
    # No paths: the locations of TensorFlow and the sources do not affect the libraries.
    flags = (*_FLAGS, *_LINK, *_LINK_CORE, *_LINK_OPS, *tensorflow.defines)
    for text in (os.uname().machine, tensorflow.version, *flags):
        digest.update(text.encode() + b"\0")
    for path in files:
        content = (source / path).read_bytes()
        digest.update(f"{path}\0{len(content)}\0".encode() + content)
    return Recipe(source, core, ops, tensorflow, digest.hexdigest()[:16])


NAMES = ("g++", "c++", "clang++")
_SECONDS = 30.0


@dataclass(frozen=True)
class Compiler:
    """A working compiler.

    Attributes:
        command: its command line.
        version: the first line of its --version output.
    """

    command: tuple[str, ...]
    version: str

    @property
    def key(self) -> str:
        """Eight characters that identify this compiler."""
        # "CXX=g++ -O1" is a different compiler than "CXX=g++".
        text = "\0".join((self.version, *self.command[1:]))
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def __str__(self) -> str:
        """Its name and version.

        Example:
            >>> str(Compiler(("/usr/bin/g++",), "g++ (Debian 12.2.0-14) 12.2.0"))
            'g++ 12.2.0'
        """
        numbers = re.findall(r"(?<![\w.-])\d+\.\d+(?:\.\d+)?", self.version)
        name = Path(self.command[0]).name
        return f"{name} {numbers[-1]}" if numbers else name


def find_compiler(setting: str = "", names: tuple[str, ...] = NAMES) -> Compiler:
    """Finds a compiler.

    Args:
        setting: the command chosen by the user, with its arguments; "" for none.
        names: the commands to try otherwise, in order of preference.

    Raises:
        NativeUnavailableError: no compiler is found, or the chosen one does not work.
    """
    command = _words(setting)
    if not command:
        command = next(([name] for name in names if shutil.which(name)), [])
    if not command:
        raise NativeUnavailableError(
            f"No C++ compiler was found (looked for {', '.join(names)}). Install one (Debian: "
            f"apt-get install g++; conda: gxx_linux-64 and CXX), or run tfdist build "
            f"--into-package on a host that has one and install a wheel built there."
        )
    try:
        done = subprocess.run(
            [*command, "--version"],
            env=environment_of_programs(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
        )
        problem = "" if done.returncode == 0 else _last(done.stderr) or f"code {done.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        origin = "given by CXX" if setting else "found in PATH"
        raise NativeUnavailableError(
            f"The C++ compiler {shlex.join(command)}, {origin}, does not work: --version "
            f"failed ({problem}). Set CXX to a working compiler."
        )
    return Compiler(tuple(command), done.stdout.partition("\n")[0])


def _words(setting: str) -> list[str]:
    try:
        return shlex.split(setting)
    except ValueError as error:
        raise NativeUnavailableError(
            f"CXX is not a command ({error}). Received: {setting!r}. Set it to a C++ compiler, or "
            f"unset it."
        ) from error


def _last(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


MANIFEST = "build.json"


@dataclass(frozen=True)
class Build:
    """The location of the libraries, and how they were built.

    Attributes:
        folder: the directory that contains them.
        tensorflow: the version of TensorFlow that they were built for.
        compiler: the name and version of the compiler.
        libc: the C library that they were linked against; "" if it has no version.
        seconds: the compilation time.
        finished: when the build finished, in seconds since the epoch.
        stamp: unique to this build, even among builds with the same key.
        digests: library name -> SHA-256 of the file.
    """

    folder: Path
    tensorflow: str
    compiler: str
    libc: str
    seconds: float
    finished: float
    stamp: str
    digests: dict[str, str]

    @property
    def core(self) -> Path:
        """The library without TensorFlow."""
        return self.folder / CORE

    @property
    def ops(self) -> Path | None:
        """The library with the TensorFlow ops; None if there are no ops."""
        return self.folder / OPS if OPS in self.digests else None

    @property
    def libraries(self) -> list[Path]:
        """The paths of all libraries."""
        return [self.folder / name for name in self.digests]

    def runs_here(self) -> bool:
        """Whether this host's C library is at least as new as the one it was linked against.

        A home directory or an image can carry a build to an older system.
        """
        name, _, number = self.libc.partition(" ")
        here, _, newest = libc().partition(" ")
        return name == here and _numbers(number) <= _numbers(newest)


def write(folder: Path, recipe: Recipe, compiler: Compiler, seconds: float) -> None:
    """Writes the manifest of a build."""
    digests = {name: _digest(folder / name) for name in (CORE, OPS) if name in _files(folder)}
    build = Build(
        folder=folder,
        tensorflow=recipe.tensorflow.version,
        compiler=str(compiler),
        libc=libc(),
        seconds=round(seconds, 1),
        finished=time.time(),
        stamp=secrets.token_hex(8),
        digests=digests,
    )
    values = asdict(build)
    del values["folder"]
    (folder / MANIFEST).write_text(json.dumps(values, indent=1))


def read_build(folder: Path) -> Build | None:
    """The build in a directory; None if there is none, or it is incomplete or truncated."""
    try:
        build = Build(folder=folder, **json.loads((folder / MANIFEST).read_text()))
        digests = {name: _digest(folder / name) for name in build.digests}
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return build if digests == build.digests and CORE in digests else None


def libc() -> str:
    """Name and version of this host's C library.

    Example:
        >>> libc()  # doctest: +SKIP
        'glibc 2.36'
    """
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        return ""


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _files(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdecimal())


_COMPILE_SECONDS = 900.0
_SHOWN_LINES = 6


class CompilationError(Exception):
    """The compiler failed.

    Attributes:
        shown: the relevant lines of its output.
        log: the command and its full output.
    """

    def __init__(self, shown: str, log: str) -> None:
        super().__init__(shown)
        self.shown = shown
        self.log = log


def compile_into(folder: Path, recipe: Recipe, compiler: Compiler) -> str:
    """Builds the core, and the ops if there are any.

    Args:
        folder: an empty directory for the libraries.
        recipe: what to build.
        compiler: the compiler to use.

    Returns:
        The commands and the compiler's warnings.

    Raises:
        CompilationError: the compiler failed.
    """
    units = [(recipe.source / path, recipe.compile_core) for path in recipe.core]
    core = [path for path, _ in units]
    ops = folder / "ops.cc"
    if recipe.ops:
        # A single unit, because TensorFlow's headers take longer to compile than the code itself.
        # It is started first, since it takes longest.
        ops.write_text("".join(f'#include "{path}"\n' for path in recipe.ops))
        units.insert(0, (ops, recipe.compile_ops))
    objects = {path: f"{number}.o" for number, (path, _) in enumerate(units)}
    pool = ThreadPoolExecutor(max(1, min(len(units), len(os.sched_getaffinity(0)))))
    try:
        pending = []
        for path, flags in units:
            unit = ("-c", str(path), "-o", objects[path])
            pending.append(pool.submit(_run, (*compiler.command, *flags, *unit), folder))
        logs = [future.result() for future in as_completed(pending)]
    finally:
        # After a failure or Ctrl-C, do not start the remaining units.
        pool.shutdown(cancel_futures=True)
    links = [(CORE, core, recipe.link_core)]
    if recipe.ops:
        links.append((OPS, [ops], recipe.link_ops))
    for library, paths, flags in links:
        inputs = (objects[path] for path in paths)
        logs.append(_run((*compiler.command, *inputs, "-o", library, *flags), folder))
    for name in objects.values():
        (folder / name).unlink()
    ops.unlink(missing_ok=True)
    return "\n".join(logs)


def _run(command: tuple[str, ...], folder: Path) -> str:
    log = f"$ {shlex.join(command)}\n"
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment_of_programs(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_COMPILE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilationError(str(error), f"{log}{error}\n") from error
    log += done.stdout
    if done.returncode != 0:
        failure = f"{command[0]} exited with code {done.returncode}"
        raise CompilationError(_shown(done.stdout) or failure, f"{log}{failure}\n")
    return log


def _shown(output: str) -> str:
    """A few lines from the first error on, which often causes the others; else the last lines."""
    lines = [line for line in output.splitlines() if line.strip()]
    end = max(0, len(lines) - _SHOWN_LINES)
    first = min(end, next((i for i, line in enumerate(lines) if "error:" in line), end))
    return "\n".join(lines[first:][:_SHOWN_LINES])
