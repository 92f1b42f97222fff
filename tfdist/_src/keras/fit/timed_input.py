"""Tells the recorder when a step waits for its input, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist._src import native
from tfdist._src.comm import marks


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


def received(batch: Any) -> Any:
    """Returns a batch that a step has waited for."""
    if native.has_ops():
        parts = [] if tf.executing_eagerly() else tf.nest.flatten(batch, expand_composites=True)
        with tf.control_dependencies([part for part in parts if tf.is_tensor(part)]):
            marks.input_ends()
    return batch
