"""The machine's limit: every rank copies memory, without communication."""

from __future__ import annotations

from benchmarks.all_reduce.compiling import RANKS, build
from benchmarks.all_reduce.job import Job, Process


def memcpy(job: Job) -> list[Process]:
    """Returns one process per rank."""
    program = build("gcc", [RANKS / "memcpy.c"], job.builds / "memcpy")
    return job.each_rank(str(program))
