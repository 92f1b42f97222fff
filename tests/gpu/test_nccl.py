"""Groups of NCCL with a single rank."""

from __future__ import annotations


def test_one_rank(execute, nccl):
    assert "ok" in execute("nccl", NCCL_LIBRARY=nccl)
