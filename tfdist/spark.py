"""Training on Spark: `tfdist.spark.Distributor` runs workers as the tasks of a barrier stage.

This module requires the extra `tfdist[spark]`.
"""

try:
    import pyarrow  # noqa: F401
    import pyspark.sql  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"tfdist.spark needs PySpark and PyArrow ({error}): pip install 'tfdist[spark]'"
    ) from error

from tfdist._src.spark.dataset_shard import get_dataset_shard
from tfdist._src.spark.distributor import Distributor

__all__ = ["Distributor", "get_dataset_shard"]
