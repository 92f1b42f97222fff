"""The rows of a DataFrame that a worker gets: from Spark's task to a `tf.data.Dataset`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    import tensorflow as tf

ROWS = "TFDIST_SPARK_ROWS"
"""The environment variable with the path of this worker's rows."""


def write_rows(batches: Iterator[pa.RecordBatch], schema: str, path: Path) -> None:
    """Writes rows as an Arrow file.

    Args:
        batches: the rows.
        schema: Spark's schema, as JSON.
        path: of the file.
    """
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    known = to_arrow_schema(StructType.fromJson(json.loads(schema)))
    with pa.OSFile(str(path), "wb") as file:
        writer = None
        for batch in batches:
            writer = writer or pa.ipc.new_file(file, batch.schema)
            writer.write_batch(batch)
        (writer or pa.ipc.new_file(file, known)).close()


def get_dataset_shard() -> tf.data.Dataset:
    """This worker's rows of the DataFrame that `Distributor.run_on_dataframe` was given.

    Returns:
        A dataset of rows: dictionaries of scalar tensors by the columns' names, or of vectors for
        columns of arrays, all of one length. Its cardinality is known. Batches of it are this
        worker's own: pass them on with `strategy.distribute_datasets_from_function`.

    Raises:
        ValueError: this is not a worker of `run_on_dataframe`, or a column has nulls, arrays of
            different lengths, or a type that has no tensor.

    Example:
        ```python
        rows = tfdist.spark.get_dataset_shard()
        batches = rows.map(lambda row: (row["features"], row["label"])).shuffle(1000).batch(64)
        model.fit(strategy.distribute_datasets_from_function(lambda context: batches))
        ```
    """
    import tensorflow as tf

    path = os.environ.get(ROWS)
    if path is None:
        raise ValueError(
            "There are no rows of Spark here: get_dataset_shard() is for what "
            "tfdist.spark.Distributor.run_on_dataframe runs"
        )
    with pa.memory_map(path) as file:
        reader = pa.ipc.open_file(file)
        count = sum(reader.get_batch(i).num_rows for i in range(reader.num_record_batches))
        first = reader.schema.empty_table().to_batches() or [_empty(reader.schema)]
        sample = reader.get_batch(0) if reader.num_record_batches else first[0]
    signature = {
        name: tf.TensorSpec([None, *value.shape[1:]], tf.as_dtype(_tensor_type(value)), name)
        for name, value in _columns(sample).items()
    }
    batches = tf.data.Dataset.from_generator(
        lambda: _read(path), output_signature=signature, name="spark"
    )
    return batches.unbatch().apply(tf.data.experimental.assert_cardinality(count))


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], schema=schema)


def _read(path: str) -> Iterator[dict[str, Any]]:
    with pa.memory_map(path) as file:
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            yield _columns(reader.get_batch(number))


def _tensor_type(value: Any) -> Any:
    return np.bytes_ if value.dtype == object else value.dtype


def _columns(batch: pa.RecordBatch) -> dict[str, Any]:
    return {
        name: _array(name, column)
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }


def _array(name: str, column: pa.Array) -> Any:
    """A column as an array of shape [rows] or [rows, length]."""
    where = f"column {name!r} of the DataFrame"
    if column.null_count:
        raise ValueError(f"{where} has nulls: fill them, or drop these rows")
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        lengths = set(column.value_lengths().to_pylist())
        if len(lengths) > 1:
            raise ValueError(f"{where} has arrays of different lengths: pad them")
        values = _array(name, column.flatten())
        return values.reshape(len(column), *(lengths or {0}), *values.shape[1:])
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return np.array([text.encode() for text in column.to_pylist()], object)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return np.array(column.to_pylist(), object)
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise ValueError(
            f"{where} has the type {kind}, which has no tensor: cast it to numbers, strings or "
            "arrays of them (vectors of Spark ML: pyspark.ml.functions.vector_to_array), or drop it"
        )
    return column.to_numpy(zero_copy_only=False)
