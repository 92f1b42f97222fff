"""TensorFlow's own RING collectives over gRPC."""

from __future__ import annotations

import sys

from reducing.job import Job, Process
from reducing.python import ENVIRONMENT, require


def tf_ring(job: Job) -> list[Process]:
    """One process per rank."""
    require(sys.executable, "tensorflow", "pip install tensorflow")
    env = {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2"}
    return job.each_rank(sys.executable, "-m", "reducing.ranks.tf_ring", env=env)
