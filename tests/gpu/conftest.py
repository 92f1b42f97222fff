"""Tests on a real GPU: `python -m pytest --confcutdir=tests/gpu -m gpu tests/gpu`.

They take Python, a C++ compiler, NVIDIA's driver and NVRTC, and no TensorFlow.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.csrc.compiling import Toolchain
from tfdist.errors import NativeUnavailableError
from tfdist.native import gpu_kernels, nvidia, nvrtc, tensorflow_package
from tfdist.native.tensorflow_package import TensorFlowPackage

_SECONDS = 240
PROGRAMS = (
    "device",
    "device_codecs",
    "device_compressed",
    "device_faults",
    "device_gpus",
    "device_path",
    "device_processes",
    "device_selection",
    "device_stream_waits",
    "nccl",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder are of this kind."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def architecture() -> str:
    """What the kernels of the first GPU are compiled for, such as "sm_90"."""
    try:
        return nvidia.architecture()
    except NativeUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def kernels(architecture: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled kernels."""
    binary, _ = gpu_kernels.compile_for(architecture, nvrtc.find())
    path = tmp_path_factory.mktemp("kernels") / f"{architecture}.cubin"
    path.write_bytes(binary)
    return path


@pytest.fixture(scope="session")
def programs(architecture: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The C++ tests that run on a GPU, by their names."""
    try:
        tensorflow = tensorflow_package.find()
    except NativeUnavailableError:
        tensorflow = TensorFlowPackage(Path(), "")
    toolchain = Toolchain(("-O1", "-g1"), tmp_path_factory.mktemp("csrc"), tensorflow=tensorflow)
    return toolchain.programs(PROGRAMS).tests


@pytest.fixture(scope="session")
def nccl() -> str:
    """The path of this Python environment's NCCL, or its name where it has none."""
    return nvidia.nccl()


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
