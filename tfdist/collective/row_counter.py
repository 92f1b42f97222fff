"""Counts the rows of steps where the native core, which counts them otherwise, does not run."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.collective import tokens


class RowCounter:
    """A number of rows that steps add to, eagerly or in a graph."""

    def __init__(self) -> None:
        self._variable: Any = None

    def add(self, rows: tf.Tensor) -> None:
        """Adds an int64 scalar."""
        if self._variable is None:
            host = str(tf.config.list_logical_devices("CPU")[0].name)
            self._variable = tokens.make(host, tf.int64)
        with tf.device(self._variable.device):
            tf.raw_ops.AssignAddVariableOp(resource=self._variable, value=rows)

    def read(self) -> int:
        """The sum so far; outside of graphs."""
        if self._variable is None:
            return 0
        return int(tf.raw_ops.ReadVariableOp(resource=self._variable, dtype=tf.int64))


own = RowCounter()
"""Rows of this worker's input."""

everyone = RowCounter()
"""Rows of global batches."""
