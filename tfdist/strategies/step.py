"""The training step that a replica is in: its share of the global batch, what it has written."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

import tensorflow as tf


class Step:
    """One replica's part of one step over a global batch; a context manager.

    Inside it, a loss is the mean over the replica's rows, and its gradient is weighted by the
    replica's share of the rows: summed over the replicas, it is that of the global batch.

    Args:
        rows: the rows of this replica, an int32 scalar.
        total: the rows of the global batch, an int32 scalar.
        first_row: the place of this replica's first row in the global batch, an int32 scalar.

    Attributes:
        share: rows of this replica / rows of the global batch, a float32 scalar.
        written: the mirrored variables that the replica has assigned so far, in order.
        weighed: the optimizers, by id, whose loss has been weighted before the backward pass.
        counts_batches: whether a metric that takes up a loss counts batches, not rows.
    """

    def __init__(self, rows: tf.Tensor, total: tf.Tensor, first_row: tf.Tensor) -> None:
        self.rows = rows
        self.first_row = first_row
        self.share = tf.math.divide_no_nan(tf.cast(rows, tf.float32), tf.cast(total, tf.float32))
        self.written: dict[int, Any] = {}
        self.weighed: set[int] = set()
        self.counts_batches = False

    def weigh(self, value: tf.Tensor) -> tf.Tensor:
        """Multiplies by the share; a replica without rows counts for nothing, NaN or not."""
        share = tf.cast(self.share, value.dtype)
        return tf.where(share > 0, value * share, tf.zeros_like(value))

    def unweigh(self, value: tf.Tensor) -> tf.Tensor:
        """Divides by the share; zero for a replica without rows."""
        return tf.math.divide_no_nan(value, tf.cast(self.share, value.dtype))

    def zero_without_rows(self, values: list[Any]) -> list[Any]:
        """The values, or zeros on a replica without rows, where they may be NaN."""
        dense = [i for i, v in enumerate(values) if not isinstance(v, tf.IndexedSlices)]
        chosen = tf.cond(
            self.share > 0,
            lambda: [values[i] for i in dense],
            lambda: [tf.zeros_like(values[i]) for i in dense],
        )
        values = list(values)
        for i, value in zip(dense, chosen, strict=True):
            values[i] = value
        return values

    def __enter__(self) -> Step:
        _stack().append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _stack().pop()


def current_step() -> Step | None:
    """The step that the calling replica is in, if any."""
    stack = _stack()
    return stack[-1] if stack else None


_local = threading.local()


def _stack() -> list[Step]:
    if not hasattr(_local, "steps"):
        _local.steps = []
    return _local.steps  # type: ignore[no-any-return]
