"""The rows of a DataFrame that a worker reads: columns, files and a `tf.data.Dataset`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark.sql import types

from tfdist._src.options import InternalVariable

if TYPE_CHECKING:
    import tensorflow as tf


_SCALARS = (types.IntegralType, types.FractionalType, types.BooleanType)
_TEXTS = (types.StringType, types.BinaryType)


def check_columns(schema: types.StructType) -> None:
    """Checks the columns before any data is read.

    Raises:
        ValueError: a column has a type without a tensor equivalent, or two columns have the same
            name.

    Example:
        >>> check_columns(types.StructType([types.StructField("x", types.LongType())]))
    """
    names = [field.name for field in schema.fields]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"the DataFrame has several columns named {twice[0]!r}: rename them")
    for field in schema.fields:
        kind = field.dataType
        if isinstance(kind, types.ArrayType):
            kind = kind.elementType
        if isinstance(kind, types.DecimalType) or not isinstance(kind, (*_SCALARS, *_TEXTS)):
            raise ValueError(
                f"column {field.name!r} of the DataFrame has the type "
                f"{field.dataType.simpleString()}, which has no tensor: cast it to numbers, "
                "strings or arrays of them (vectors of Spark ML: "
                "pyspark.ml.functions.vector_to_array), or drop it"
            )


def has_arrays(kind: pa.DataType) -> bool:
    """Whether the values of a column are arrays."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def array_length(name: str, column: pa.Array) -> int | None:
    """The common length of all arrays in a column; None if the column has no arrays or no rows.

    Raises:
        ValueError: the column has nulls, or arrays of different lengths.
    """
    where = f"column {name!r} of the DataFrame"
    if column.null_count:
        raise ValueError(f"{where} has nulls: fill them, or drop these rows")
    if not has_arrays(column.type):
        return None
    if column.flatten().null_count:
        raise ValueError(f"{where} has nulls in its arrays: fill them, or drop these rows")
    lengths = set(column.value_lengths().to_pylist())
    if len(lengths) > 1:
        raise ValueError(f"{where} has arrays of different lengths: pad them")
    return lengths.pop() if lengths else None


def value_type(kind: pa.DataType) -> Any:
    """The NumPy type of the values or array elements of a column; `np.bytes_` for texts."""
    if has_arrays(kind):
        kind = kind.value_type
    return np.dtype(kind.to_pandas_dtype()) if pa.types.is_primitive(kind) else np.bytes_


def values(column: pa.Array) -> Any:
    """Returns a column as an array of shape [rows], or [rows, length] for a column of arrays."""
    if has_arrays(column.type):
        return values(column.flatten()).reshape(len(column), -1)
    if pa.types.is_primitive(column.type):
        return column.to_numpy(zero_copy_only=False)
    return np.array(column.cast(pa.large_binary()).to_pylist(), object)


Lengths = dict[str, int | None]
"""The length of the arrays in each column; None if a column has no arrays or no known length."""


def write_rows(batches: Iterator[pa.RecordBatch], descriptor: int) -> tuple[str, Lengths]:
    """Writes rows as an Arrow stream.

    Args:
        batches: the rows.
        descriptor: the file's descriptor, which stays open.

    Returns:
        The rows' serialized schema in hexadecimal digits ("" if there are no rows), and the lengths
        of the arrays.

    Raises:
        ValueError: a column has nulls, or arrays of different lengths.
    """
    schema, found = "", Lengths()
    with open(descriptor, "wb", closefd=False) as file:
        writer = None
        for batch in batches:
            if not batch.num_rows:
                continue
            if writer is None:
                writer = pa.ipc.new_stream(file, batch.schema)
                schema = batch.schema.serialize().to_pybytes().hex()
            writer.write_batch(batch)
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                merge(found, {name: array_length(name, column)})
        if writer is not None:
            writer.close()
    return schema, found


def merge(known: Lengths, more: Lengths) -> None:
    """Adds the lengths of the arrays in further rows to `known`.

    Raises:
        ValueError: a column has arrays of different lengths.
    """
    for name, length in more.items():
        before = known.setdefault(name, length)
        if before is None:
            known[name] = length
        elif length not in (None, before):
            raise ValueError(
                f"column {name!r} of the DataFrame has arrays of different lengths: pad them"
            )


def description(path: str, schema: str, lengths: Lengths) -> str:
    """The value of the environment variable that describes the rows to a worker.

    Args:
        path: the path of the worker's rows.
        schema: the schema of these rows.
        lengths: the lengths of the arrays in each column, the same for all workers.
    """
    return json.dumps({"path": path, "schema": schema, "lengths": lengths})


def get_dataset_shard() -> tf.data.Dataset:
    """This worker's rows of the DataFrame passed to `Distributor.run_on_dataframe`.

    Returns:
        A dataset of rows, with a known cardinality. Each row is a dictionary from column names to
        scalar tensors, or to vectors of equal length for columns of arrays. Batches of the dataset
        are local to this worker: distribute them with `strategy.distribute_datasets_from_function`.

    Raises:
        ValueError: this is not a worker of `run_on_dataframe`.

    Example:
        ```python
        rows = tfdist.spark.get_dataset_shard()
        batches = rows.map(lambda row: (row["features"], row["label"])).shuffle(1000).batch(64)
        model.fit(strategy.distribute_datasets_from_function(lambda context: batches))
        ```
    """
    import tensorflow as tf

    if InternalVariable.SPARK_ROWS not in os.environ:
        raise ValueError(
            "This process has received no rows from Spark: call get_dataset_shard() in the "
            "function that tfdist.spark.Distributor.run_on_dataframe runs"
        )
    found = json.loads(os.environ[InternalVariable.SPARK_ROWS])
    path, lengths = found["path"], found["lengths"]
    schema = pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(found["schema"])))
    signature = {}
    for field in schema:
        row = [lengths.get(field.name) or 0] if has_arrays(field.type) else []
        kind = tf.as_dtype(value_type(field.type))
        signature[field.name] = tf.TensorSpec([None, *row], kind, field.name)
    batches = tf.data.Dataset.from_generator(
        lambda: ({name: values(batch[name]) for name in schema.names} for batch in _batches(path)),
        output_signature=signature,
        name="spark",
    )
    count = sum(batch.num_rows for batch in _batches(path))
    return batches.unbatch().apply(tf.data.experimental.assert_cardinality(count))


def _batches(path: str) -> Iterator[pa.RecordBatch]:
    with pa.OSFile(path) as file:
        if file.size():
            yield from pa.ipc.open_stream(file)
