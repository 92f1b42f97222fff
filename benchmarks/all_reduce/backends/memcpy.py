"""The backend `memcpy`: every rank copies memory and does not communicate.

It shows how much data the machine's cores can move at the same time.
"""

from __future__ import annotations

from benchmarks.all_reduce.compiling import RANKS, build
from benchmarks.all_reduce.job import Job, Process


def memcpy(job: Job) -> list[Process]:
    """Returns the processes to start: one for each rank."""
    program = build("gcc", [RANKS / "memcpy.c"], job.builds / "memcpy")
    return job.each_rank(str(program))
