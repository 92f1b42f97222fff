"""The GPU kernels: their sources, their flags, and the cache of what they compile to."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdist._src.native import lock, nvrtc, store
from tfdist._src.native.console import say
from tfdist._src.native.recipe import SOURCE
from tfdist._src.options import NativeOptions
from tfdist.errors import NativeUnavailableError

# Of the CUDA toolkits and TensorFlows that are supported, Volta is the oldest.
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
# As the processor's code: a product is rounded before it is added, so that the bits are the same.
FLAGS = ("-std=c++17", "-default-device", "-fmad=false")
_ARCHITECTURE = re.compile(r"sm_(\d{2,3})[af]?")


@dataclass(frozen=True)
class Kernels:
    """The compiled kernels for one architecture.

    Attributes:
        path: of the binary.
        architecture: such as "sm_90".
        compiler: the NVRTC that made it, with its version.
        seconds: how long that took; 0 if it was there.
    """

    path: Path
    architecture: str
    compiler: str
    seconds: float


def find(architecture: str, options: NativeOptions) -> Path | None:
    """The kernels for an architecture that have been compiled before, by any NVRTC.

    Args:
        architecture: such as "sm_90".
        options: the cache; kernels in the package are found as well.
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
    announce: Callable[[str], object] = say,
) -> list[Kernels]:
    """Finds the compiled kernels for some architectures, or compiles them.

    Args:
        architectures: such as "sm_80".
        options: the cache.
        force: whether to compile even where they are found.
        package: the directory to compile into instead of the cache.
        announce: receives progress messages; prints them to stderr by default.

    Raises:
        NativeUnavailableError: NVRTC is missing, does not know an architecture, or fails.
    """
    compiler = nvrtc.find()
    for architecture in architectures:
        _check(architecture, compiler)
    root = (
        store.writable_package(package) if package else store.writable_cache(options, announce)
    ) / f"{_PREFIX}{_key()}-{compiler.version}"
    root.mkdir(mode=0o755, exist_ok=True)
    with lock.held(root / store.LOCK, lock.SECONDS, announce):
        return [_ensure(root, each, compiler, force, announce) for each in architectures]


def compile_for(
    architecture: str, compiler: nvrtc.Nvrtc, flags: Sequence[str] = ()
) -> tuple[bytes, str]:
    """Compiles the kernels.

    Args:
        architecture: such as "sm_90".
        compiler: the NVRTC to use.
        flags: further ones.

    Returns:
        The binary, and the compiler's log.

    Raises:
        nvrtc.CompilationError: the log.
    """
    options = [f"--gpu-architecture={architecture}", *FLAGS, *flags]
    source = (SOURCE / _UNIT).read_text()
    return compiler.compile(Path(_UNIT).name, source, _headers(), options)


def _ensure(
    root: Path,
    architecture: str,
    compiler: nvrtc.Nvrtc,
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
    except nvrtc.CompilationError as error:
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


def _check(architecture: str, compiler: nvrtc.Nvrtc) -> None:
    known = [name for name in compiler.architectures() if int(name[3:]) >= OLDEST]
    found = _ARCHITECTURE.fullmatch(architecture)
    if not found or f"sm_{found[1]}" not in known:
        raise NativeUnavailableError(
            f"{compiler} compiles GPU kernels for {', '.join(known)}. Received: {architecture!r}."
        )


def clean(root: Path) -> list[Path]:
    """Removes the kernels of other sources from a directory; the caller must hold its lock.

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
    """What the kernels include, by the names that they use."""
    paths = [path for pattern in _HEADERS for path in sorted(SOURCE.glob(pattern))]
    headers = {path.relative_to(SOURCE).as_posix(): path.read_text() for path in paths}
    standard = sorted((SOURCE / _STANDARD).iterdir())
    return headers | {path.name: path.read_text() for path in standard}
