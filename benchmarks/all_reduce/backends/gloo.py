"""The backend `gloo`: Gloo's all-reduce, called through `torch.distributed`."""

from __future__ import annotations

from benchmarks.all_reduce.job import Job, Process
from benchmarks.all_reduce.python import ENVIRONMENT, require


def gloo(job: Job) -> list[Process]:
    """Returns the processes to start: one for each rank."""
    remedy = "pip install torch==2.13.0, or name a Python that has it by --torch_python"
    require(job.torch_python, "torch", remedy)
    program = [job.torch_python, "-m", "benchmarks.all_reduce.ranks.gloo"]
    return job.each_rank(*program, env={**ENVIRONMENT, "GLOO_SOCKET_IFNAME": job.hosts.interface})
