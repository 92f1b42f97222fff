"""Whether graphs know of the group what could change: ranks, sizes, numbers of replicas.

A graph outlives a change of the group. What tfdist puts into graphs is read when they run
(`place` of a communicator). Whatever else is read while a graph is traced may become a constant of
it, so reading it is noted here: such graphs must be traced again when the group has changed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import tensorflow as tf

_known = False
_here = threading.local()


def note_read() -> None:
    """Records that something that may change is read; only while a graph is traced."""
    global _known
    if not (_known or tf.executing_eagerly() or getattr(_here, "unnoted", False)):
        _known = True


def note_stale() -> None:
    """Records that graphs know something that has changed."""
    global _known
    _known = True


@contextlib.contextmanager
def unnoted() -> Iterator[None]:
    """What is read in this context enters no graph, or none that lasts."""
    outer, _here.unnoted = getattr(_here, "unnoted", False), True
    try:
        yield
    finally:
        _here.unnoted = outer


def know_group() -> bool:
    """Whether something has been read while a graph was traced, since `forget`."""
    return _known


def forget() -> None:
    """Declares that all graphs will be traced again before they run."""
    global _known
    _known = False
