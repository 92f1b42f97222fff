"""What tests/gpu runs, on a driver of threads that is taken for CUDA's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cpp.compiling import Programs
from tests.harness.tiers import exhaustive
from tfdist._src.native import nvidia

ROOT = Path(__file__).parents[2]
TWO_RANKS = {"NCCL_RANKS": "2"}
pytestmark = [exhaustive, pytest.mark.timeout(1800)]


@pytest.fixture
def environment(programs: Callable[[str], Programs], tmp_path: Path) -> dict[str, str]:
    """With a driver where that of a GPU would be, and an NCCL."""
    fakes = programs("plain").fakes
    (tmp_path / nvidia.DRIVER).symlink_to(fakes["cuda"])
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(tmp_path),
        "GPU_KERNELS": os.devnull,
        "NCCL_LIBRARY": str(fakes["nccl"]),
        "TFDIST_NCCL_LIBRARY": str(fakes["nccl"]),
    }


@pytest.mark.parametrize(
    ("name", "two_ranks"),
    [
        ("device_compressed", False),
        ("device_faults", True),
        ("device_gpus", False),
        ("device_obstacles", False),
        ("device_path", True),
        ("device_processes", False),
        ("nccl", False),
        ("nccl", True),
        ("nccl_endings", True),
    ],
)
def test_programs_end_without_an_error(programs, environment, name, two_ranks):
    if two_ranks:
        environment |= TWO_RANKS
    if name.startswith("device"):
        environment["FAKE_NCCL"] = environment["NCCL_LIBRARY"]
    program = str(programs("plain").tests[name])
    done = subprocess.run([program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_nccl_that_lets_nobody_share_a_gpu_is_named(environment):
    words = ["-q", "-rs", "--confcutdir=tests/gpu", "-m", "gpu"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "tests/gpu/test_nccl.py", "-k", "not one_rank"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert "two ranks share a GPU since NCCL 2.30; this is 2.21.5" in done.stdout, done.stdout
    assert " skipped" in done.stdout and "passed" not in done.stdout
