"""NVIDIA's run-time compiler for GPU kernels, which needs neither a GPU nor a driver."""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tfdist._src.native import nvidia
from tfdist.errors import NativeUnavailableError

# Of `tensorflow[and-cuda]`, and of CUDA 13's packages.
_PACKAGES = ("nvidia.cuda_nvrtc", "nvidia.cu13")
_HELP = 'Install it: pip install "tensorflow[and-cuda]", or nvidia-cuda-nvrtc-cu12.'
_BUILTINS = "libnvrtc-builtins.so.*"
_SUCCESS = 0


class CompilationError(Exception):
    """NVRTC has refused a program; the message is its log."""


class Nvrtc:
    """A loaded NVRTC.

    Args:
        path: of the library; its other half is in the same folder, or is found by its name.

    Attributes:
        path: as above.
        version: such as "12.5".

    Raises:
        NativeUnavailableError: it cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # CUDA 13's does not look for its other half in its own folder.
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
        """What it compiles for, such as "sm_90", oldest first."""
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
            name: shown in messages.
            source: in CUDA C++.
            headers: what it includes, by the names that it uses.
            options: of NVRTC, among them the architecture.

        Returns:
            The binary ("cubin"), and the log.

        Raises:
            CompilationError: the program is wrong, or an option.
        """
        # In a thread of its own, since NVRTC leaves its thread with the locale "C".
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


def find() -> Nvrtc:
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
