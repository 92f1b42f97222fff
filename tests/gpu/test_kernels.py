"""The kernels of an all-reduce, and communicators of ranks that share a GPU."""

from __future__ import annotations

import shutil

import pytest

from .conftest import PROGRAMS


def test_values_order_and_faults(execute):
    for name in PROGRAMS:
        if name.startswith("device"):
            execute(name)


def test_memory_is_used_as_allowed(execute):
    tool = shutil.which("compute-sanitizer")
    if not tool:
        pytest.skip("compute-sanitizer, which checks a kernel's use of memory, is not on the PATH")
    words = [tool, "--tool=memcheck", "--leak-check=full", "--error-exitcode=9"]
    assert "ERROR SUMMARY: 0 errors" in execute("device", "alone", by=words)
