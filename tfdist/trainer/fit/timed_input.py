"""Tells the recorder when a step waits for its input, for how long, and for how many rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist import native
from tfdist.collective import marks, row_counter


def wait_for(take: Callable[[], Any]) -> Any:
    """Takes a batch, or an optional one, eagerly or in a graph; followed by `received`.

    Args:
        take: gets it from an iterator.
    """
    if not native.has_ops():
        return take()
    begins = marks.input_begins()
    with tf.control_dependencies([] if tf.executing_eagerly() else [begins]):
        return take()


def received(batch: Any, rows: Any) -> Any:
    """Returns a batch that a step has waited for.

    Args:
        batch: the batch.
        rows: the number of its rows on this worker, an integer or a scalar tensor.
    """
    note = marks.input_ends if native.has_ops() else row_counter.own.add
    parts = [] if tf.executing_eagerly() else tf.nest.flatten(batch, expand_composites=True)
    # The number of rows may be a constant.
    with tf.control_dependencies([part for part in parts if tf.is_tensor(part)]):
        note(tf.cast(rows, tf.int64))
    return batch


def note_global_batch(rows: Any) -> None:
    """Records how many rows a step has on all workers, an integer or a scalar tensor."""
    note = marks.global_batch if native.has_ops() else row_counter.everyone.add
    note(tf.cast(rows, tf.int64))
