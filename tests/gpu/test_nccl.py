"""Groups of NCCL with a single rank."""

from __future__ import annotations


def test(execute, nccl):
    print(execute("nccl", NCCL_LIBRARY=nccl))
