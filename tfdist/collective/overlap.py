"""Which collectives a step waits for, and which run beside it; for the recorder only."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collective import marks

_here = threading.local()


@contextlib.contextmanager
def overlapping() -> Iterator[None]:
    """Collectives added to a graph in this context run beside the step, which needs them later."""
    outer, _here.overlaps = overlaps(), True
    try:
        yield
    finally:
        _here.overlaps = outer


def overlaps() -> bool:
    """Whether this code runs inside `overlapping`."""
    return getattr(_here, "overlaps", False)


def mark_ready(
    communicator: str, key: str, tensors: Sequence[tf.Tensor], *, stalls: bool
) -> None:
    """Records, in a graph, when the tensors of a collective exist.

    A collective starts only when those before it have ended, so its start does not tell.

    Args:
        communicator: the communicator's name.
        key: the collective's.
        tensors: all that it needs.
        stalls: whether the step waits for it from then on.
    """
    if not tf.executing_eagerly():
        with _after(tensors):
            marks.ready(communicator, key, stalls=stalls)


def mark_stall(communicator: str, value: tf.Tensor) -> None:
    """Records, in a graph, that a step which has this value waits for an overlapping collective.

    Args:
        communicator: the communicator's name.
        value: the last thing that the step can compute without the collective.
    """
    if not tf.executing_eagerly():
        with _after([value]):
            marks.ready(communicator)


def _after(tensors: Sequence[tf.Tensor]) -> Any:
    graph = tf.compat.v1.get_default_graph()
    return tf.control_dependencies([tensor for tensor in tensors if tensor.graph is graph])
