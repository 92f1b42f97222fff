"""The sizes of values and variables, before they exist."""

from __future__ import annotations

import math
from collections.abc import Iterable

import keras
import tensorflow as tf

from tfdist._src.pipeline.partition.graph import Spec

UNKNOWN = 64
"""The assumed size of a dimension, other than the rows, that the model leaves open."""


def concrete(spec: Spec, rows: int) -> tuple[int, ...]:
    """The shape of a value for a number of rows."""
    return tuple(UNKNOWN if size is None else size for size in spec.with_rows(rows).shape)


def bytes_of(spec: Spec, rows: int) -> int:
    """The bytes of a value for a number of rows."""
    return math.prod(concrete(spec, rows)) * _item_bytes(spec.dtype)


def count(variables: Iterable[keras.Variable]) -> int:
    """The number of elements in variables."""
    return sum(math.prod(v.shape) for v in variables)


def variable_bytes(variable: keras.Variable) -> int:
    """The bytes of a variable."""
    return count([variable]) * _item_bytes(variable.dtype)


def _item_bytes(dtype: str) -> int:
    size: int = tf.as_dtype(dtype).size
    return size
