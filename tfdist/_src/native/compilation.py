"""Compiles the core and the TensorFlow operations, and describes the resulting build.

This module does not import TensorFlow, because that takes seconds, and the launcher compiles before
it starts workers. Therefore it does not use `tf.sysconfig` to find the flags for operations. A test
checks that the flags are the same.
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

# All supported versions of TensorFlow are compiled with these macros. With other values, the ops
# could not be loaded. The names of symbols depend on the first macro, and TensorFlow's build sets
# the second one on every processor.
_DEFINES = ("-D_GLIBCXX_USE_CXX11_ABI=1", "-DEIGEN_MAX_ALIGN_BYTES=64")
_FRAMEWORK = "libtensorflow_framework.so.2"
# Matches the metadata of distributions that contain the package `tensorflow`, but not of others,
# such as tensorflow_hub.
_METADATA = re.compile(
    r"(?:tensorflow|tensorflow_cpu|tensorflow_gpu|tensorflow_intel|tensorflow_cpu_aws"
    r"|tensorflow_rocm|intel_tensorflow|tf_nightly|tf_nightly_cpu)-(?P<version>[^-]+)"
    r"\.(?:dist|egg)-info"
)


@dataclass(frozen=True)
class TensorFlowPackage:
    """The installed TensorFlow.

    Attributes:
        folder: the directory with the headers and libraries of TensorFlow.
        version: the version of the installed distribution.
    """

    folder: Path
    version: str

    @property
    def defines(self) -> tuple[str, ...]:
        """The macros that must be defined to compile code with TensorFlow's headers."""
        return _DEFINES

    @property
    def includes(self) -> tuple[str, ...]:
        """The flags with which the compiler finds TensorFlow's headers and omits their warnings."""
        return ("-isystem", str(self.folder / "include"))

    @property
    def link_flags(self) -> tuple[str, ...]:
        """The flags with which the linker finds TensorFlow's library."""
        return (f"-L{self.folder}", f"-l:{_FRAMEWORK}")


def find_tensorflow() -> TensorFlowPackage:
    """Finds the TensorFlow that `import tensorflow` would import.

    Raises:
        NativeUnavailableError: TensorFlow is not installed, or the installation is incomplete.

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
    # If TensorFlow has no metadata, it is identified by the size of its library.
    return TensorFlowPackage(folder, "+".join(versions) or f"unknown-{framework.stat().st_size}")


SOURCE = Path(__file__).parents[2] / "csrc"
CORE = "libtfdist_core.so"
OPS = "libtfdist_ops.so"

# Do not add -march=native. The libraries may be in a home directory, an image or a wheel that hosts
# with different processors share. Functions that need newer instructions enable them individually.
# NDEBUG affects TensorFlow's headers, and TensorFlow itself is compiled with it.
_COMPILE = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-DNDEBUG", "-Wall", "-Wextra")
# The first two flags allow the compiler to vectorize more code. They are safe because no code reads
# errno or the flags for floating-point exceptions. The third one disables fused multiply-add: a
# product is rounded before it is added, so that all processors compute the same bits.
ARITHMETIC = ("-fno-trapping-math", "-fno-math-errno", "-ffp-contract=off")
_HARDENING = ("-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2")
_FLAGS = (*_COMPILE, *ARITHMETIC, *_HARDENING)
_LINK = ("-shared", "-pthread", "-Wl,-z,relro", "-Wl,-z,now")
# With `-z defs`, the linker reports undefined symbols of the core. Otherwise these would be
# reported only when the core is loaded. In glibc before 2.34, dlopen is in libdl.
_LINK_CORE = ("-Wl,-z,defs", f"-Wl,-soname,{CORE}", "-ldl")
_LINK_OPS = (f"-Wl,-soname,{OPS}", f"-l:{CORE}", "-Wl,-rpath,$ORIGIN")
_SUFFIXES = (".cc", ".h", ".inc")
_OPS_FOLDER = "tf"


@dataclass(frozen=True)
class Recipe:
    """The sources and flags from which the core and the TensorFlow operations are compiled.

    Attributes:
        source: the directory with the C++ sources.
        core: the translation units of the core, as paths relative to `source`.
        ops: the translation units of the ops, as paths relative to `source`; empty if there are no
            ops.
        tensorflow: the TensorFlow for which to compile the ops.
        key: 16 characters that identify everything that affects the libraries, except the compiler.
    """

    source: Path
    core: tuple[str, ...]
    ops: tuple[str, ...]
    tensorflow: TensorFlowPackage
    key: str

    @property
    def compile_core(self) -> tuple[str, ...]:
        """The flags with which the core is compiled."""
        # The ops use C++ symbols of the core, so both must be compiled for the same ABI.
        return (*_FLAGS, *self.tensorflow.defines, f"-I{self.source}")

    @property
    def compile_ops(self) -> tuple[str, ...]:
        """The flags with which the ops are compiled."""
        return (*self.compile_core, *self.tensorflow.includes)

    @property
    def link_core(self) -> tuple[str, ...]:
        """The flags with which the core is linked, to be passed after the object files."""
        return (*_LINK, *_LINK_CORE)

    @property
    def link_ops(self) -> tuple[str, ...]:
        """The flags with which the ops are linked, to be passed after the object files.

        The linker must run in the directory that contains the core's library.
        """
        return (*_LINK, "-L.", *_LINK_OPS, *self.tensorflow.link_flags)


def read_recipe(tensorflow: TensorFlowPackage, source: Path = SOURCE) -> Recipe:
    """Finds the sources, and computes a key from them and the flags.

    Args:
        tensorflow: the TensorFlow for which to compile the ops.
        source: the directory with the C++ sources. The ops are in its subdirectory `tf`, and the
            core is in the rest of the directory.

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
    # The key does not depend on the locations of TensorFlow and the sources, because they do not
    # affect the libraries.
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
        command: the command that runs the compiler, with its arguments.
        version: the first line that the compiler prints for `--version`.
    """

    command: tuple[str, ...]
    version: str

    @property
    def key(self) -> str:
        """Eight characters that identify the compiler and its arguments."""
        # For example, "CXX=g++ -O1" and "CXX=g++" have different keys.
        text = "\0".join((self.version, *self.command[1:]))
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def __str__(self) -> str:
        """Returns the name and version of the compiler.

        Example:
            >>> str(Compiler(("/usr/bin/g++",), "g++ (Debian 12.2.0-14) 12.2.0"))
            'g++ 12.2.0'
        """
        numbers = re.findall(r"(?<![\w.-])\d+\.\d+(?:\.\d+)?", self.version)
        name = Path(self.command[0]).name
        return f"{name} {numbers[-1]}" if numbers else name


def find_compiler(setting: str = "", names: tuple[str, ...] = NAMES) -> Compiler:
    """Finds a C++ compiler, and checks that it runs.

    Args:
        setting: the command that the user has chosen, with arguments; "" if the user has not chosen
            a compiler.
        names: the commands to try if `setting` is empty, in order of preference.

    Raises:
        NativeUnavailableError: no compiler is found, or the compiler does not work.
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
    """Compiled libraries in a directory, and information about their compilation.

    Attributes:
        folder: the directory that contains the libraries.
        tensorflow: the version of TensorFlow for which the libraries were compiled.
        compiler: the name and version of the compiler.
        libc: the name and version of the C library on the host of the compilation; "" if unknown.
        seconds: the duration of the compilation.
        finished: the time when the compilation ended, in seconds since 1970.
        stamp: a random text that is different for each build, even if the sources are the same.
        digests: for each library, by name, the SHA-256 digest of its file.
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
        """The path of the core's library."""
        return self.folder / CORE

    @property
    def ops(self) -> Path | None:
        """The path of the library with the TensorFlow operations; None if there is none."""
        return self.folder / OPS if OPS in self.digests else None

    @property
    def libraries(self) -> list[Path]:
        """The paths of all libraries."""
        return [self.folder / name for name in self.digests]

    def runs_here(self) -> bool:
        """Whether the C library of this host is new enough for the libraries.

        It may be too old if hosts with different systems share a home directory, or if an image
        contains the libraries.
        """
        name, _, number = self.libc.partition(" ")
        here, _, newest = libc().partition(" ")
        return name == here and _numbers(number) <= _numbers(newest)


def write(folder: Path, recipe: Recipe, compiler: Compiler, seconds: float) -> None:
    """Writes the manifest, a file that describes a build."""
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
    """Returns the build in a directory.

    Returns None if there is no build, or if one of its files is missing or damaged.
    """
    try:
        build = Build(folder=folder, **json.loads((folder / MANIFEST).read_text()))
        digests = {name: _digest(folder / name) for name in build.digests}
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return build if digests == build.digests and CORE in digests else None


def libc() -> str:
    """Returns the name and version of this host's C library; "" if unknown.

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
        shown: the most relevant lines of the compiler's output.
        log: the command, and the compiler's full output.
    """

    def __init__(self, shown: str, log: str) -> None:
        super().__init__(shown)
        self.shown = shown
        self.log = log


def compile_into(folder: Path, recipe: Recipe, compiler: Compiler) -> str:
    """Compiles the core, and the TensorFlow operations if the recipe contains any.

    Args:
        folder: an empty directory, into which the libraries are written.
        recipe: the sources and flags.
        compiler: the compiler that compiles and links the libraries.

    Returns:
        The commands and the compiler's output, as a log.

    Raises:
        CompilationError: the compiler failed.
    """
    units = [(recipe.source / path, recipe.compile_core) for path in recipe.core]
    core = [path for path, _ in units]
    ops = folder / "ops.cc"
    if recipe.ops:
        # The ops are compiled as a single unit, because TensorFlow's headers take longer to compile
        # than the code itself. This unit takes longest, so it is started first.
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
    """Returns a few lines of the compiler's output, starting with the first error if possible.

    The first error is often the cause of the others.
    """
    lines = [line for line in output.splitlines() if line.strip()]
    end = max(0, len(lines) - _SHOWN_LINES)
    first = min(end, next((i for i, line in enumerate(lines) if "error:" in line), end))
    return "\n".join(lines[first:][:_SHOWN_LINES])
