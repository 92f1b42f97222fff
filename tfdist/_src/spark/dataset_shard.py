"""The rows of a DataFrame that a worker gets: from Spark's task to a `tf.data.Dataset`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

from tfdist._src.spark.columns import array_length, has_arrays, value_type, values

if TYPE_CHECKING:
    import tensorflow as tf

ROWS = "TFDIST_SPARK_ROWS"
"""The environment variable that tells a worker where its rows are, and how long their arrays."""

Lengths = dict[str, int | None]
"""The length of the arrays in each column; None for other columns, or if not known."""


def write_rows(batches: Iterator[pa.RecordBatch], descriptor: int) -> tuple[str, Lengths]:
    """Writes rows as a stream of Arrow.

    Args:
        batches: the rows.
        descriptor: of the file, which stays open.

    Returns:
        Their schema, serialized, in hexadecimal digits, "" if there are none; and their lengths.

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
    """Adds the lengths that other rows have.

    Raises:
        ValueError: they differ.
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
    """The value of the environment variable.

    Args:
        path: of the worker's rows.
        schema: theirs.
        lengths: those of all workers' rows.
    """
    return json.dumps({"path": path, "schema": schema, "lengths": lengths})


def get_dataset_shard() -> tf.data.Dataset:
    """This worker's rows of the DataFrame that `Distributor.run_on_dataframe` was given.

    Returns:
        A dataset of rows: dictionaries of scalar tensors by the columns' names, or of vectors for
        columns of arrays, all of one length. Its cardinality is known. Batches of it are this
        worker's own: pass them on with `strategy.distribute_datasets_from_function`.

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

    if ROWS not in os.environ:
        raise ValueError(
            "There are no rows of Spark here: get_dataset_shard() is for what "
            "tfdist.spark.Distributor.run_on_dataframe runs"
        )
    found = json.loads(os.environ[ROWS])
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
