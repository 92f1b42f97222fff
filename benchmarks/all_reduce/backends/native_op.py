"""The backend `native_op`: tfdist's all-reduce as a TensorFlow operation."""

from __future__ import annotations

import sys

from benchmarks.all_reduce.backends.native import find_core
from benchmarks.all_reduce.job import Job, Process
from benchmarks.all_reduce.python import ENVIRONMENT, require


def native_op(job: Job) -> list[Process]:
    """Returns the processes to start: one for each rank."""
    require(sys.executable, "tensorflow", "pip install tensorflow")
    find_core()
    env = {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2"}
    return job.each_rank(sys.executable, "-m", "benchmarks.all_reduce.ranks.native_op", env=env)
