"""The backend `tf_ring`: TensorFlow's own RING collectives over gRPC."""

from __future__ import annotations

import sys

from benchmarks.all_reduce.job import Job, Process
from benchmarks.all_reduce.python import ENVIRONMENT, require


def tf_ring(job: Job) -> list[Process]:
    """Returns the processes to start: one for each rank."""
    require(sys.executable, "tensorflow", "pip install tensorflow")
    env = {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2"}
    return job.each_rank(sys.executable, "-m", "benchmarks.all_reduce.ranks.tf_ring", env=env)
