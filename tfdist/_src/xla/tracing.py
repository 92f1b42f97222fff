"""What code that adds operations to a graph has to know of its compilation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist._src.internals.graphs import in_xla_context, marking_operations

_LEFT_OUT = "_tfdist_left_out"
_HAS_ROWS = "TfdistHasRows"


def is_compiled_here() -> bool:
    """Whether XLA will compile the operations that are added to the default graph."""
    return not tf.executing_eagerly() and in_xla_context()


@contextlib.contextmanager
def left_to_tensorflow() -> Iterator[None]:
    """Operations that are added to the default graph in this context are not compiled.

    For what workers with different programs must compute alike, bit for bit: XLA's rounding depends
    on what else is in a program.
    """
    with contextlib.nullcontext() if tf.executing_eagerly() else marking_operations(_LEFT_OUT):
        yield


def is_left_to_tensorflow(operation: Any) -> bool:
    """Whether an operation was added within `left_to_tensorflow`."""
    return _LEFT_OUT in operation.node_def.attr


def or_zeros(condition: tf.Tensor, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Tensors if a condition holds, otherwise zeros; each depends on itself alone.

    One conditional for all copies nothing. XLA fuses a selection with what is around it.
    """
    if not values:
        return []
    if is_compiled_here():
        return [tf.where(condition, v, tf.zeros([], v.dtype)) for v in values]
    chosen = tf.cond(condition, lambda: list(values), lambda: [tf.zeros_like(v) for v in values])
    for value, result in zip(values, chosen, strict=True):
        result.set_shape(value.shape)
    return list(chosen)


def has_rows(rows: tf.Tensor) -> tf.Tensor:
    """Whether a replica has rows; where XLA compiles, this is known: what has none is not compiled.

    Args:
        rows: the number of rows.

    Returns:
        A bool scalar.
    """
    return tf.identity(rows > 0, name=_HAS_ROWS)


def is_has_rows(operation: Any) -> bool:
    """Whether an operation is that of `has_rows`."""
    name = str(operation.name).rpartition("/")[2]
    return operation.type == "Identity" and name.partition("_")[0] == _HAS_ROWS
