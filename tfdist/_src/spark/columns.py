"""Which columns of a DataFrame can become tensors, and their values as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import types

_SCALARS = (types.IntegralType, types.FractionalType, types.BooleanType)
_TEXTS = (types.StringType, types.BinaryType)


def check_columns(schema: types.StructType) -> None:
    """Checks the columns before anything is read.

    Raises:
        ValueError: one has a type that has no tensor, or two have the same name.

    Example:
        >>> check_columns(types.StructType([types.StructField("x", types.LongType())]))
    """
    names = [field.name for field in schema.fields]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"the DataFrame has several columns of the name {twice[0]!r}: rename them")
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
    """The length of all arrays in a column; None if it has no arrays, or no rows.

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
    """The type of a column's numbers in NumPy; bytes for texts."""
    if has_arrays(kind):
        kind = kind.value_type
    return np.dtype(kind.to_pandas_dtype()) if pa.types.is_primitive(kind) else np.bytes_


def values(column: pa.Array) -> Any:
    """A column as an array of shape [rows], or [rows, length] if it has arrays."""
    if has_arrays(column.type):
        return values(column.flatten()).reshape(len(column), -1)
    if pa.types.is_primitive(column.type):
        return column.to_numpy(zero_copy_only=False)
    return np.array(column.cast(pa.large_binary()).to_pylist(), object)
