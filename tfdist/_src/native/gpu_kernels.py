"""The GPU kernels: their sources, NVIDIA's run-time compiler, and the cache of compiled kernels."""

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

# The packages that contain NVRTC: as installed by `tensorflow[and-cuda]`, and for CUDA 13.
_PACKAGES = ("nvidia.cuda_nvrtc", "nvidia.cu13")
_HELP = 'Install it: pip install "tensorflow[and-cuda]", or nvidia-cuda-nvrtc-cu12.'
_BUILTINS = "libnvrtc-builtins.so.*"
_SUCCESS = 0


class CompilationError(Exception):
    """NVRTC could not compile a program, or a call to NVRTC failed; the message has the reason."""


class Nvrtc:
    """NVRTC, NVIDIA's run-time compiler, as a loaded library.

    Args:
        path: the library's path; its builtins library is in the same folder, or is found by name.

    Attributes:
        path: the library's path.
        version: the version, such as "12.5".

    Raises:
        NativeUnavailableError: the library cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # CUDA 13's library does not search its own folder for its builtins library.
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
        """The architectures that NVRTC supports, such as "sm_90", oldest first."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", numbers)
        return [f"sm_{number}" for number in numbers]

    def compile(
        self, name: str, source: str, headers: Mapping[str, str], options: Sequence[str]
    ) -> tuple[bytes, str]:
        """Compiles a program.

        Args:
            name: the name in messages.
            source: the source, in CUDA C++.
            headers: the included files, by the names in `#include` directives.
            options: NVRTC's options, including the architecture.

        Returns:
            The binary ("cubin"), and the log.

        Raises:
            CompilationError: the program or an option is invalid.
        """
        # In a separate thread, because NVRTC changes the locale of its thread to "C".
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
    """The NVRTC of this environment, or else the system's.

    Raises:
        NativeUnavailableError: there is none.
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


# Volta, the oldest architecture that the supported CUDA toolkits and TensorFlow versions include.
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
# A product is rounded before it is added, so that GPUs compute the same bits as CPUs.
FLAGS = ("-std=c++17", "-default-device", "-fmad=false")
_ARCHITECTURE = re.compile(r"sm_(\d{2,3})[af]?")


@dataclass(frozen=True)
class Kernels:
    """The compiled kernels for one architecture.

    Attributes:
        path: the binary's path.
        architecture: the architecture, such as "sm_90".
        compiler: the name and version of the compiler, NVRTC.
        seconds: the compilation time; 0 if it already existed.
    """

    path: Path
    architecture: str
    compiler: str
    seconds: float


def find(architecture: str, options: NativeOptions) -> Path | None:
    """The existing kernels for an architecture, compiled by any NVRTC.

    Args:
        architecture: the architecture, such as "sm_90".
        options: the cache; kernels in the package are also found.
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
    """Finds the compiled kernels for some architectures, or compiles them.

    Args:
        architectures: the architectures, such as "sm_80".
        options: the cache.
        force: whether to compile even if compiled kernels are found.
        package: the directory to compile into instead of the cache.
        announce: receives progress messages; prints them to stderr by default.

    Raises:
        NativeUnavailableError: NVRTC is missing, does not know an architecture, or fails.
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
    """Compiles the kernels.

    Args:
        architecture: the architecture, such as "sm_90".
        compiler: the NVRTC to use.
        flags: further flags.

    Returns:
        The binary, and the compiler's log.

    Raises:
        CompilationError: the compilation failed; the message is the log.
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
    """Removes kernels compiled from other sources; the caller must hold the directory's lock.

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
    """The files that the kernels include, by the names in `#include` directives."""
    paths = [path for pattern in _HEADERS for path in sorted(SOURCE.glob(pattern))]
    headers = {path.relative_to(SOURCE).as_posix(): path.read_text() for path in paths}
    standard = sorted((SOURCE / _STANDARD).iterdir())
    return headers | {path.name: path.read_text() for path in standard}
