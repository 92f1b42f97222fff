"""The NVIDIA software and GPUs of this host, and the links between the GPUs."""

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
        name: the name that the driver reports.
        architecture: the compilation target for its code, such as "sm_90".
    """

    name: str
    architecture: str


class DriverError(NativeUnavailableError):
    """A function of the driver has failed.

    Args:
        function: the function's name.
        status: the function's return value.

    Attributes:
        call: the function and its return value, for messages.
        status: the function's return value.
    """

    def __init__(self, function: str, status: int) -> None:
        self.call = f"{function} returns {status}"
        super().__init__(f"no GPU: {self.call}")
        self.status = status


class Driver:
    """The GPUs' driver, initialized.

    Args:
        library: the path or name of the driver's library; "" for the system's.

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
        """The newest CUDA version that the driver supports, such as "12.4"."""
        number = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(number))
        return f"{number.value // 1000}.{number.value % 1000 // 10}"

    def devices(self) -> list[Device]:
        """The GPUs that are visible to this process, in the order of their numbers."""
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
        """Calls a function of the driver; pointers and sizes must be ctypes objects.

        Raises:
            DriverError: the function fails.
        """
        if status := getattr(self._library, function)(*arguments):
            raise DriverError(function, status)


def architecture() -> str:
    """The compilation target for the first GPU's code, such as "sm_90".

    Raises:
        NativeUnavailableError: there is no GPU, or no driver.
    """
    devices = Driver().devices()
    if not devices:
        raise NativeUnavailableError("no GPU: CUDA_VISIBLE_DEVICES shows none")
    return devices[0].architecture


def nccl() -> str:
    """The path of NCCL's library in this Python environment, which TensorFlow also opens.

    If there is none, the library's name, by which the system may find it.
    """
    paths = (folder / NCCL for folder in folders(_NCCL_PACKAGES))
    return next((str(path) for path in paths if path.exists()), NCCL)


def nccl_version(library: str) -> str:
    """The version of an NCCL library, such as "2.28.3".

    Raises:
        NativeUnavailableError: the library cannot be loaded.
    """
    number = ctypes.c_int()
    try:
        ctypes.CDLL(library).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError) as error:
        raise NativeUnavailableError(f"NCCL cannot be used: {error}") from error
    # The encoding since version 2.9: 20900 is 2.9.0.
    major, rest = divmod(number.value, 10_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def folders(packages: Sequence[str]) -> list[Path]:
    """The library folders of Python packages such as "nvidia.nccl", if installed."""
    found = []
    for package in packages:
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        places = spec.submodule_search_locations if spec else None
        found += [Path(place) / "lib" for place in places or ()]
    return found


# Copies run in a separate process, since a process that uses a broken link may hang, even at exit.
_PROGRAM = "tfdist._src.native.gpu_copies"
_COPY_SECONDS = 3.0


class Copy(str, Enum):
    """The outcome of a copy."""

    INTACT = "intact"
    WRONG = "wrong"  # other bytes arrived
    STUCK = "stuck"  # it does not end
    TAKEN = "taken"  # not tried, because another process holds the GPU's memory
    FAILED = "failed"  # refused by the driver, or not tried


@dataclass(frozen=True)
class Link:
    """How one GPU reads another GPU's memory.

    Attributes:
        reader: the number of the GPU that reads.
        owner: the number of the GPU that owns the memory.
        copy: the outcome of a copy.
        direct: whether the reader can access that memory; otherwise copies pass through the host.
        rank: the driver's rank of the link, 0 for the fastest; None if the driver reports none.
        atomics: whether atomic operations of a GPU work over the link, as over NVLink.
        speed: bytes per second of an intact copy.
        error: why a copy failed.
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
    """Tries a copy between all ordered pairs of GPUs.

    Args:
        library: the driver's path or name; "" for the system's.
        gpus: the number of GPUs.
        seconds: the time limit for all pairs together; a pair without a result by then counts as
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
        if line.endswith("\n"):  # The last line may be cut off.
            values = json.loads(line)
            link = Link(**{**values, "copy": Copy(values["copy"])})
            links[link.reader, link.owner] = link
    return [
        links.get(pair) or Link(*pair, Copy.FAILED, error=why)
        for pair in itertools.permutations(range(gpus), 2)
    ]
