"""Runs a script on two executors of a local Spark: python -m tests.engines.on_spark SCRIPT…"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from pyspark.sql import SparkSession

from tests.engines.conftest import clean_environment
from tfdist.spark import Distributor

# Two workers of one core each, in JVMs of their own.
MASTER = "local-cluster[2,1,1024]"


@contextlib.contextmanager
def session(**settings: str) -> Iterator[SparkSession]:
    """A session whose executors see the environment without what engines set."""
    builder = SparkSession.builder.master(MASTER).config("spark.ui.enabled", "false")
    for name in ("PYTHONPATH", "TF_CPP_MIN_LOG_LEVEL", "TFDIST_START_TIMEOUT"):
        builder = builder.config(f"spark.executorEnv.{name}", clean_environment()[name])
    for name, value in settings.items():
        builder = builder.config(name, value)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    found = builder.getOrCreate()
    try:
        yield found
    finally:
        found.stop()


if __name__ == "__main__":
    with session():
        Distributor(num_processes=2).run(*sys.argv[1:])
