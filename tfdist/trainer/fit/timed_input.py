"""Takes the next batch of a step and tells the recorder how long the step waited for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist import native
from tfdist.collective import native_ops


def take_batch(take: Callable[[], Any]) -> Any:
    """Calls `take`, which gets a batch or an optional from an iterator, eagerly or in a graph."""
    if not native.has_ops():
        return take()
    begin = native_ops.note_input(begins=True)
    if tf.executing_eagerly():
        batch = take()
        native_ops.note_input(begins=False)
        return batch
    with tf.control_dependencies([begin]):
        batch = take()
    with tf.control_dependencies(_tensors(batch)):
        native_ops.note_input(begins=False)
    return batch


def _tensors(batch: Any) -> list[Any]:
    if hasattr(batch, "has_value"):
        return [batch.has_value()]
    return [t for t in tf.nest.flatten(batch, expand_composites=True) if tf.is_tensor(t)]
