"""Tests on a real GPU: `python -m pytest --confcutdir=tests/gpu -m gpu tests/gpu`.

They take Python, a C++ compiler, NVIDIA's driver and NVRTC; those that take torch or TensorFlow are
skipped where these see no GPU.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.cpp.compiling import Toolchain
from tests.harness.gpus import NCCL_SHARES
from tfdist._src.native import compilation, gpu_kernels, nvidia
from tfdist._src.native.compilation import TensorFlowPackage
from tfdist._src.options import Options
from tfdist.errors import NativeUnavailableError

_SECONDS = 240
PROGRAMS = (
    "device",
    "device_codecs",
    "device_compressed",
    "device_faults",
    "device_gpus",
    "device_obstacles",
    "device_path",
    "device_processes",
    "device_selection",
    "device_stream_waits",
    "nccl",
    "nccl_endings",
)
_SHARING = (2, 30)  # of NCCL: since then, ranks that share a GPU can be allowed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder are of this kind, and none is a default one."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.exhaustive)


@pytest.fixture(scope="session")
def architecture() -> str:
    """What the kernels of the first GPU are compiled for, such as "sm_90"."""
    try:
        return nvidia.architecture()
    except NativeUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def is_stand_in(architecture: str) -> bool:
    """Whether the driver is that of threads, which has its kernels and the host's memory."""
    return hasattr(ctypes.CDLL(nvidia.DRIVER), "fake_launches")


@pytest.fixture(scope="session")
def kernels(architecture: str, is_stand_in: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled kernels."""
    if is_stand_in:
        return Path(os.devnull)
    binary, _ = gpu_kernels.compile_for(architecture, gpu_kernels.find_nvrtc())
    path = tmp_path_factory.mktemp("kernels") / f"{architecture}.cubin"
    path.write_bytes(binary)
    return path


@pytest.fixture(scope="session")
def toolchain(architecture: str, tmp_path_factory: pytest.TempPathFactory) -> Toolchain:
    """What compiles C++ for tests on a GPU."""
    try:
        tensorflow = compilation.find_tensorflow()
    except NativeUnavailableError:
        tensorflow = TensorFlowPackage(Path(), "")
    flags = ("-O1", "-g1", "-fPIC")
    return Toolchain(flags, tmp_path_factory.mktemp("csrc"), tensorflow=tensorflow)


@pytest.fixture(scope="session")
def programs(toolchain: Toolchain) -> dict[str, Path]:
    """The C++ tests that run on a GPU, by their names."""
    return toolchain.programs(PROGRAMS).tests


@pytest.fixture(scope="session")
def nccl() -> str:
    """The path of NCCL: as it is set, that of this Python environment, or the system's name."""
    return Options.from_environment(dict(os.environ)).nccl_library or nvidia.nccl()


@pytest.fixture(scope="session")
def nccl_version(architecture: str, nccl: str) -> str:
    """Its version."""
    try:
        return nvidia.nccl_version(nccl)
    except NativeUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def sharing(nccl_version: str) -> dict[str, str]:
    """The environment in which two ranks of NCCL share a GPU."""
    if tuple(map(int, nccl_version.split("."))) < _SHARING:
        pytest.skip(f"two ranks share a GPU since NCCL 2.30; this is {nccl_version}")
    return {**NCCL_SHARES, "NCCL_RANKS": "2"}


@pytest.fixture
def execute(programs: dict[str, Path], kernels: Path) -> Callable[..., str]:
    """Runs a program with arguments, by another one if there is one; returns what it prints."""

    def run(name: str, *arguments: str, by: Sequence[str] = (), **environment: str) -> str:
        done = subprocess.run(
            [*by, str(programs[name]), *arguments],
            env={**os.environ, "GPU_KERNELS": str(kernels), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_SECONDS,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    return run
