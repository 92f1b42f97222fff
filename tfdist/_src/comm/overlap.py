"""Which collectives a step waits for, and which run beside it; for the recorder only."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist._src.comm import marks

_here = threading.local()
# The collection with a graph's marks of collectives that overlap.
_BESIDE = "tfdist_collectives_beside"


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


@dataclass(frozen=True)
class Bucket:
    """Tensors that are reduced in one collective.

    Attributes:
        key: the collective's key.
        members: the indices of the tensors.
        overlaps: whether the step goes on beside it.
        marks: what must run before the collective, or the recorder would hear of it too late.
    """

    key: str
    members: Sequence[int]
    overlaps: bool
    marks: Sequence[Any]


def marked_buckets(
    communicator: str,
    key: str,
    tensors: Sequence[tf.Tensor],
    plan: Sequence[Sequence[int]],
    *,
    notes: bool = True,
) -> Iterator[Bucket]:
    """The buckets of a reduction, marked, in a graph, for when their tensors exist.

    A collective starts only when those before it have ended, so its start does not tell. The step
    goes on beside all of them but the last: when all tensors exist, it waits. One collective alone
    tells by its start, unless it overlaps: a step may wait for it before it is even queued.

    Args:
        communicator: the communicator's name.
        key: the reduction's.
        tensors: what is reduced.
        plan: for each bucket the indices of its tensors.
        notes: whether this replica's marks count: one's among those of a process that share a
            communicator.
    """
    last = len(plan) - 1
    for number, members in enumerate(plan):
        part = f"{key}, part {number}" if key and number else key or f"{number}"
        beside = overlaps() or number < last
        made = []
        if notes and (beside or last > 0) and not tf.executing_eagerly():
            with _after(tensors if number == last else [tensors[i] for i in members]):
                made.append(marks.ready(communicator, part, stalls=not beside))
            if beside:
                tf.compat.v1.get_default_graph().add_to_collection(_BESIDE, made[-1])
        yield Bucket(part, members, beside, made)


def mark_stall(communicator: str, values: Sequence[tf.Tensor]) -> None:
    """Records, in a graph, that a step which has these values waits for an overlapping collective.

    Args:
        communicator: the communicator's name.
        values: what the step computes before it needs the collective.
    """
    if not tf.executing_eagerly():
        # A short step may have the values before the collective's mark has been made.
        begun = tf.compat.v1.get_default_graph().get_collection(_BESIDE)
        if begun:
            with _after([*values, *begun]):
                marks.ready(communicator)


def _after(elements: Sequence[Any]) -> Any:
    graph = tf.compat.v1.get_default_graph()
    return tf.control_dependencies([one for one in elements if one.graph is graph])
