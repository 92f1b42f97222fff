"""Groups of NCCL: with a single rank, and with two processes that share the GPU."""

from __future__ import annotations


def test_one_rank_communicates_by_nccl(nccl_version, execute, nccl):
    said = execute("nccl", NCCL_LIBRARY=nccl)
    assert said.startswith("NCCL ")
    assert "ok" in said


def test_two_ranks_share_a_gpu(sharing, execute, nccl):
    """Every collective, and a hundred groups one after the other."""
    execute("nccl", NCCL_LIBRARY=nccl, **sharing)


def test_a_peer_is_silent_or_killed(sharing, execute, nccl):
    execute("nccl_endings", NCCL_LIBRARY=nccl, **sharing)


def test_communicators_share_a_gpu_by_nccl(sharing, execute, nccl):
    for program in ("device_path", "device_faults"):
        execute(program, FAKE_NCCL=nccl, **sharing)
