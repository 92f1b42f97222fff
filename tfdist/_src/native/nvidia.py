"""Finds NVIDIA's software and GPUs on this host, and tests the links between the GPUs."""

import ctypes
import importlib.util
import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from tfdist.errors import NativeUnavailableError

DRIVER = "libcuda.so.1"
NCCL = "libnccl.so.2"
_NCCL_PACKAGES = ("nvidia.nccl", "nvidia.cu13")
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
_MAX_NAME = 128


@dataclass(frozen=True)
class Device:
    """A GPU.

    Attributes:
        name: the name of the GPU, as reported by the driver.
        architecture: the architecture for which kernels must be compiled, such as "sm_90".
    """

    name: str
    architecture: str


class DriverError(NativeUnavailableError):
    """A function of the driver has failed.

    Args:
        function: the name of the function.
        status: the value that the function has returned.

    Attributes:
        call: a text with the name of the function and the value that it has returned, for messages.
        status: see the argument.
    """

    def __init__(self, function: str, status: int) -> None:
        self.call = f"{function} returns {status}"
        super().__init__(f"no GPU: {self.call}")
        self.status = status


class Driver:
    """Loads and initializes the driver of the GPUs, and calls its functions.

    Args:
        library: the path or name of the driver's library; "" for the system's driver.

    Raises:
        NativeUnavailableError: there is no GPU, or no driver.
    """

    def __init__(self, library: str = "") -> None:
        try:
            self._library = ctypes.CDLL(library or DRIVER)
        except OSError as error:
            raise NativeUnavailableError(f"no GPU: {error}") from error
        self.call("cuInit", 0)

    @property
    def version(self) -> str:
        """The newest version of CUDA that the driver supports, such as "12.4"."""
        number = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(number))
        return f"{number.value // 1000}.{number.value % 1000 // 10}"

    def devices(self) -> list[Device]:
        """Returns the GPUs that are visible to this process, in the order of their numbers."""
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        return [self._device(number) for number in range(count.value)]

    def _device(self, number: int) -> Device:
        name = ctypes.create_string_buffer(_MAX_NAME)
        self.call("cuDeviceGetName", name, _MAX_NAME - 1, number)
        parts = []
        for attribute in (_MAJOR, _MINOR):
            part = ctypes.c_int()
            self.call("cuDeviceGetAttribute", ctypes.byref(part), attribute, number)
            parts.append(part.value)
        return Device(name.value.decode(errors="replace"), f"sm_{parts[0]}{parts[1]}")

    def call(self, function: str, *arguments: Any) -> None:
        """Calls a function of the driver. Pointers and sizes must be passed as ctypes objects.

        Raises:
            DriverError: the function returns an error.
        """
        if status := getattr(self._library, function)(*arguments):
            raise DriverError(function, status)


def architecture() -> str:
    """Returns the architecture of the first GPU, such as "sm_90".

    Raises:
        NativeUnavailableError: there is no GPU, or no driver.
    """
    devices = Driver().devices()
    if not devices:
        raise NativeUnavailableError("no GPU: CUDA_VISIBLE_DEVICES shows none")
    return devices[0].architecture


def nccl() -> str:
    """Returns the path of NCCL's library in this Python environment.

    TensorFlow loads the same library. If NCCL is not installed in the environment, returns the name
    of the library, because the system may be able to find it.
    """
    paths = (folder / NCCL for folder in folders(_NCCL_PACKAGES))
    return next((str(path) for path in paths if path.exists()), NCCL)


def nccl_version(library: str) -> str:
    """Returns the version of an NCCL library, such as "2.28.3".

    Raises:
        NativeUnavailableError: the library cannot be loaded.
    """
    number = ctypes.c_int()
    try:
        ctypes.CDLL(library).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError) as error:
        raise NativeUnavailableError(f"NCCL cannot be used: {error}") from error
    # Since version 2.9, the version is encoded in this way. For example, 20900 stands for 2.9.0.
    major, rest = divmod(number.value, 10_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def folders(packages: Sequence[str]) -> list[Path]:
    """Returns the library folders of those Python packages that are installed.

    Args:
        packages: the names of the packages, such as "nvidia.nccl".
    """
    found = []
    for package in packages:
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        places = spec.submodule_search_locations if spec else None
        found += [Path(place) / "lib" for place in places or ()]
    return found


# Copies run in a separate process. If a link is broken, a process that uses it may hang, even when
# it exits.
_PROGRAM = "tfdist._src.native.gpu_copies"
_COPY_SECONDS = 3.0


class Copy(str, Enum):
    """The outcome of a copy between two GPUs."""

    INTACT = "intact"
    WRONG = "wrong"  # the copy differs from the original
    STUCK = "stuck"  # the copy has not ended within the time limit
    TAKEN = "taken"  # the copy was not tried, because another process uses the GPU or its memory
    FAILED = "failed"  # the driver refused the copy, or it was not tried


@dataclass(frozen=True)
class Link:
    """The connection over which one GPU reads the memory of another GPU.

    Attributes:
        reader: the number of the GPU that reads.
        owner: the number of the GPU that owns the memory.
        copy: the outcome of a test copy.
        direct: whether the reader can access the owner's memory directly. Otherwise, copies pass
            through the host's memory.
        rank: the performance rank that the driver reports for the link, where 0 is the fastest;
            None if the driver does not report it.
        atomics: whether a GPU can perform atomic operations over the link, as over NVLink.
        speed: the number of bytes per second, if the copy is intact; otherwise 0.
        error: the reason why the copy failed.
    """

    reader: int
    owner: int
    copy: Copy
    direct: bool = False
    rank: int | None = None
    atomics: bool = False
    speed: float = 0.0
    error: str = ""


def measure(library: str, gpus: int, seconds: float) -> list[Link]:
    """Tries a copy for each pair of GPUs, in both directions.

    Args:
        library: the path or name of the driver's library; "" for the system's driver.
        gpus: the number of GPUs.
        seconds: the time limit for all pairs together. A pair that has no result by then counts as
            failed.
    """
    limit = str(min(_COPY_SECONDS, seconds / 2))
    try:
        done = subprocess.run(
            [sys.executable, "-m", _PROGRAM, library, limit],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
        )
        printed, why = done.stdout, f"exit code {done.returncode}"
        if said := done.stderr.decode(errors="replace").strip():
            why = said.splitlines()[-1]
    except subprocess.TimeoutExpired as error:
        printed, why = error.stdout or b"", f"not tried within {seconds:g} s"
    links = {}
    for line in printed.decode(errors="replace").splitlines(keepends=True):
        if line.endswith("\n"):  # If the program was stopped, the last line may be incomplete.
            values = json.loads(line)
            link = Link(**{**values, "copy": Copy(values["copy"])})
            links[link.reader, link.owner] = link
    return [
        links.get(pair) or Link(*pair, Copy.FAILED, error=why)
        for pair in itertools.permutations(range(gpus), 2)
    ]
