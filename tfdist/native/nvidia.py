"""Where NVIDIA's libraries are, and what its GPU is."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from tfdist.errors import NativeUnavailableError

_DRIVER = "libcuda.so.1"
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR


def folders(packages: Sequence[str]) -> list[Path]:
    """The folders with the libraries of Python packages such as "nvidia.nccl", if installed."""
    found = []
    for package in packages:
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        places = spec.submodule_search_locations if spec else None
        found += [Path(place) / "lib" for place in places or ()]
    return found


def architecture() -> str:
    """What code for the first GPU is compiled for, such as "sm_90".

    Raises:
        NativeUnavailableError: there is no GPU, or no driver.
    """
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError as error:
        raise NativeUnavailableError(f"no GPU: {error}") from error
    if status := driver.cuInit(0):
        raise NativeUnavailableError(f"no GPU: cuInit returns {status}")
    numbers = []
    for attribute in (_MAJOR, _MINOR):
        number = ctypes.c_int()
        if status := driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, 0):
            raise NativeUnavailableError(f"no GPU: cuDeviceGetAttribute returns {status}")
        numbers.append(number.value)
    return f"sm_{numbers[0]}{numbers[1]}"
