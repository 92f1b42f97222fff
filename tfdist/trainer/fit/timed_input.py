"""Tells the recorder when a step waits for its input, for how long, and for how many rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist import native
from tfdist.collective import native_ops


def wait_for(take: Callable[[], Any]) -> Any:
    """Takes a batch, or an optional one, eagerly or in a graph; followed by `received`.

    Args:
        take: gets it from an iterator.
    """
    if not native.has_ops():
        return take()
    begins = native_ops.input_begins()
    with tf.control_dependencies([] if tf.executing_eagerly() else [begins]):
        return take()


def received(batch: Any, rows: Any) -> Any:
    """Returns a batch that a step has waited for.

    Args:
        batch: the batch.
        rows: the number of its rows on this worker, an integer or a scalar tensor.
    """
    if native.has_ops():
        parts = [] if tf.executing_eagerly() else tf.nest.flatten(batch, expand_composites=True)
        # The number of rows may be a constant.
        with tf.control_dependencies([part for part in parts if tf.is_tensor(part)]):
            native_ops.input_ends(tf.cast(rows, tf.int64))
    return batch
