"""The kernels of all-reduces and codecs, and communicators of ranks that share a GPU."""

from __future__ import annotations

import shutil

import pytest

from .conftest import PROGRAMS


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name.startswith("device")])
def test_values_order_and_faults(execute, nccl, name):
    execute(name, FAKE_NCCL=nccl)


@pytest.mark.parametrize(
    "program", [("device", "alone"), ("device_codecs", "small"), ("device_selection", "small")]
)
def test_memory_is_used_as_allowed(execute, program):
    tool = shutil.which("compute-sanitizer")
    if not tool:
        pytest.skip("compute-sanitizer, which checks a kernel's use of memory, is not on the PATH")
    words = [tool, "--tool=memcheck", "--leak-check=full", "--error-exitcode=9"]
    assert "ERROR SUMMARY: 0 errors" in execute(*program, by=words)
