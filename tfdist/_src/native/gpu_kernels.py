"""Compiles the GPU kernels with NVIDIA's run-time compiler, and caches them."""

import contextlib
import ctypes
import ctypes.util
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist._src.log import logger
from tfdist._src.native import nvidia, store
from tfdist._src.native.compilation import SOURCE
from tfdist._src.options import NativeOptions
from tfdist.errors import NativeUnavailableError

# The Python packages that contain NVRTC. `tensorflow[and-cuda]` installs the first one, and the
# second one is for CUDA 13.
_PACKAGES = ("nvidia.cuda_nvrtc", "nvidia.cu13")
_HELP = 'Install it: pip install "tensorflow[and-cuda]", or nvidia-cuda-nvrtc-cu12.'
_BUILTINS = "libnvrtc-builtins.so.*"
_SUCCESS = 0


class CompilationError(Exception):
    """NVRTC could not compile a program, or a function of NVRTC has failed for another reason."""


class Nvrtc:
    """Loads NVRTC, NVIDIA's run-time compiler, and calls its functions.

    Args:
        path: the path of NVRTC's library. NVRTC also needs its builtins library, which must be in
            the same folder, or on the system's search path.

    Attributes:
        path: see the argument.
        version: the version of NVRTC, such as "12.5".

    Raises:
        NativeUnavailableError: the library cannot be loaded or used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Load the builtins library first, because NVRTC of CUDA 13 does not look for it in its
            # own folder.
            self._builtins = [ctypes.CDLL(str(p)) for p in path.parent.glob(_BUILTINS)]
            self._library = ctypes.CDLL(str(path))
            major, minor = ctypes.c_int(), ctypes.c_int()
            self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        except (OSError, AttributeError, CompilationError) as error:
            raise NativeUnavailableError(
                f"NVRTC, which compiles GPU kernels, cannot be used ({error}). {_HELP}"
            ) from error
        self.version = f"{major.value}.{minor.value}"

    def __str__(self) -> str:
        return f"NVRTC {self.version}"

    def architectures(self) -> list[str]:
        """Returns the architectures that NVRTC supports, such as "sm_90", the oldest first."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", numbers)
        return [f"sm_{number}" for number in numbers]

    def compile(
        self, name: str, source: str, headers: Mapping[str, str], options: Sequence[str]
    ) -> tuple[bytes, str]:
        """Compiles a program to a binary.

        Args:
            name: the name of the program in messages.
            source: the source code, in CUDA C++.
            headers: the contents of included files. The keys are the names in `#include`
                directives.
            options: the options for NVRTC, including the architecture.

        Returns:
            The binary ("cubin"), and the compiler's log.

        Raises:
            CompilationError: the program or an option is invalid.
        """
        # Use a separate thread, because NVRTC changes the locale of the thread that calls it.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(self._compile, name, source, headers, options).result()

    def _compile(
        self, name: str, source: str, headers: Mapping[str, str], options: Sequence[str]
    ) -> tuple[bytes, str]:
        program = ctypes.c_void_p()
        count = len(headers)
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            source.encode(),
            name.encode(),
            count,
            _strings(list(headers.values())),
            _strings(list(headers)),
        )
        try:
            status = self._library.nvrtcCompileProgram(program, len(options), _strings(options))
            log = self._read("ProgramLog", program).rstrip(b"\0").decode(errors="replace").strip()
            if status != _SUCCESS:
                raise CompilationError(log or self._message(status))
            return self._read("CUBIN", program), log
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, text)
        return text.raw

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, function)(*arguments)
        if status != _SUCCESS:
            raise CompilationError(f"{function}: {self._message(status)}")

    def _message(self, status: int) -> str:
        describe = self._library.nvrtcGetErrorString
        describe.restype = ctypes.c_char_p
        return str(describe(status).decode())


def find_nvrtc() -> Nvrtc:
    """Finds NVRTC in this Python environment or, if it is not installed there, in the system.

    Raises:
        NativeUnavailableError: NVRTC is not installed, or cannot be loaded.
    """
    for folder in nvidia.folders(_PACKAGES):
        for path in sorted(folder.glob("libnvrtc.so.*"), reverse=True):
            return Nvrtc(path)
    system = ctypes.util.find_library("nvrtc")
    if system:
        return Nvrtc(Path(system))
    raise NativeUnavailableError(f"NVRTC, which compiles GPU kernels, was not found. {_HELP}")


def _strings(texts: Sequence[str]) -> Any:
    return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))


# This is Volta, the oldest architecture that all supported versions of CUDA and TensorFlow support.
OLDEST = 70
_UNIT = "device/kernels/all.cu"
_HEADERS = (
    "device/kernels/*.h",
    "device/kernels/*.cu",
    "codec/codec.h",
    "codec/layout.h",
    "codec/arithmetic.inc",
    "reduce/half.h",
    "reduce/arithmetic.inc",
    "sparse/arithmetic.inc",
    "sparse/row.h",
)
_PREFIX = "gpu-"
_STANDARD = "device/kernels/std"
# Without fused multiply-add (fmad), a product is rounded before it is added, as on the CPU. GPUs
# and CPUs therefore compute the same bits.
FLAGS = ("-std=c++17", "-default-device", "-fmad=false")
_ARCHITECTURE = re.compile(r"sm_(\d{2,3})[af]?")


@dataclass(frozen=True)
class Kernels:
    """The compiled kernels for one architecture.

    Attributes:
        path: the path of the binary.
        architecture: the architecture of the GPU, such as "sm_90".
        compiler: the name and version of the compiler, such as "NVRTC 12.5".
        seconds: the duration of the compilation; 0 if the kernels had already been compiled.
    """

    path: Path
    architecture: str
    compiler: str
    seconds: float


def find(architecture: str, options: NativeOptions) -> Path | None:
    """Finds kernels for an architecture in the cache and in the package.

    The kernels may have been compiled by any version of NVRTC.

    Args:
        architecture: the architecture of the GPU, such as "sm_90".
        options: the settings, which contain the path of the cache.
    """
    for root in (*store.caches(options), store.PACKAGE):
        found = sorted(root.glob(f"{_PREFIX}{_key()}-*/{architecture}.cubin"))
        if found and store.is_safe(found[-1].parent):
            return found[-1]
    return None


def ensure(
    architectures: Sequence[str],
    options: NativeOptions,
    *,
    force: bool = False,
    package: Path | None = None,
    announce: Callable[[str], object] = logger.info,
) -> list[Kernels]:
    """Finds the compiled kernels for several architectures, or compiles them.

    Args:
        architectures: the architectures of the GPUs, such as "sm_80".
        options: the settings, which contain the path of the cache.
        force: whether to compile the kernels even if compiled ones are found.
        package: a directory to use instead of the cache.
        announce: a function that receives messages about the progress. By default, these are
            logged.

    Raises:
        NativeUnavailableError: NVRTC is missing, does not support an architecture, or fails.
    """
    compiler = find_nvrtc()
    for architecture in architectures:
        _check(architecture, compiler)
    root = (
        store.writable_package(package) if package else store.writable_cache(options, announce)
    ) / f"{_PREFIX}{_key()}-{compiler.version}"
    root.mkdir(mode=0o755, exist_ok=True)
    with store.held(root / store.LOCK, store.SECONDS, announce):
        return [_ensure(root, each, compiler, force, announce) for each in architectures]


def compile_for(architecture: str, compiler: Nvrtc, flags: Sequence[str] = ()) -> tuple[bytes, str]:
    """Compiles the kernels for an architecture.

    Args:
        architecture: the architecture of the GPU, such as "sm_90".
        compiler: the version of NVRTC that compiles the kernels.
        flags: additional options for NVRTC.

    Returns:
        The binary, and the compiler's log.

    Raises:
        CompilationError: the compilation failed. The message is the compiler's log.
    """
    options = [f"--gpu-architecture={architecture}", *FLAGS, *flags]
    source = (SOURCE / _UNIT).read_text()
    return compiler.compile(Path(_UNIT).name, source, _headers(), options)


def _ensure(
    root: Path,
    architecture: str,
    compiler: Nvrtc,
    force: bool,
    announce: Callable[[str], object],
) -> Kernels:
    path = root / f"{architecture}.cubin"
    if path.exists() and not force:
        return Kernels(path, architecture, str(compiler), 0)
    announce(f"compiling the GPU kernels for {architecture} ...")
    start = time.monotonic()
    try:
        binary, _ = compile_for(architecture, compiler)
    except CompilationError as error:
        raise NativeUnavailableError(
            f"The GPU kernels could not be compiled by {compiler} ({compiler.path}) for "
            f"{architecture}: {error}"
        ) from error
    unfinished = root / f".{architecture}-{secrets.token_hex(4)}"
    try:
        unfinished.write_bytes(binary)
        os.replace(unfinished, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise NativeUnavailableError(
            f"The GPU kernels could not be written to {root}: {error}. Free space there, or set "
            f"TFDIST_CACHE to another directory."
        ) from error
    return Kernels(path, architecture, str(compiler), time.monotonic() - start)


def _check(architecture: str, compiler: Nvrtc) -> None:
    known = [name for name in compiler.architectures() if int(name[3:]) >= OLDEST]
    found = _ARCHITECTURE.fullmatch(architecture)
    if not found or f"sm_{found[1]}" not in known:
        raise NativeUnavailableError(
            f"{compiler} compiles GPU kernels for {', '.join(known)}. Received: {architecture!r}."
        )


def clean(root: Path) -> list[Path]:
    """Removes kernels that were compiled from other sources than the current ones.

    The caller must hold the lock of the directory.

    Returns:
        The removed directories.
    """
    old = [f for f in root.glob(f"{_PREFIX}*") if not f.name.startswith(f"{_PREFIX}{_key()}-")]
    for folder in old:
        shutil.rmtree(folder, ignore_errors=True)
    return old


def _key() -> str:
    digest = hashlib.sha256("\0".join(FLAGS).encode())
    for name, text in [("", (SOURCE / _UNIT).read_text()), *sorted(_headers().items())]:
        digest.update(f"{name}\0{len(text)}\0{text}".encode())
    return digest.hexdigest()[:16]


def _headers() -> dict[str, str]:
    """Returns the contents of the files that the kernels include.

    The keys are the names in `#include` directives.
    """
    paths = [path for pattern in _HEADERS for path in sorted(SOURCE.glob(pattern))]
    headers = {path.relative_to(SOURCE).as_posix(): path.read_text() for path in paths}
    standard = sorted((SOURCE / _STANDARD).iterdir())
    return headers | {path.name: path.read_text() for path in standard}
