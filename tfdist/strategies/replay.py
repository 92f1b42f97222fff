"""Whether a dataset gives its last batch again, since the step on it did not stand."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Iterator

from tfdist import native


class Replay:
    """Whether the next batch of the datasets that pass through this is the last one once more.

    A batch is given again by its own dataset, inside its iterator, so that what reads the iterator
    need not know. What follows in the input pipeline must not read ahead. Datasets refer to it by
    its number; see `shares.split_batches`.

    Attributes:
        number: the core's number of it.
    """

    def __init__(self) -> None:
        self._core = native.load().library
        number = ctypes.c_int64()
        self._core.tfd_replay_create(ctypes.byref(number))
        self.number = number.value
        weakref.finalize(self, self._core.tfd_replay_close, self.number)

    @property
    def given(self) -> int:
        """The number of batches so far, without repetitions."""
        given = ctypes.c_int64()
        self._core.tfd_replay_given(self.number, ctypes.byref(given))
        return given.value

    def request(self) -> None:
        """Has the next batch be the last one again."""
        self._core.tfd_replay_request(self.number)


_local = threading.local()


@contextlib.contextmanager
def replaying(replay: Replay | None) -> Iterator[None]:
    """Has the datasets that are distributed in this thread pass through `replay`."""
    _local.replay = replay
    try:
        yield
    finally:
        _local.replay = None


def current_replay() -> Replay | None:
    """What datasets that are distributed in this thread pass through, if anything."""
    return getattr(_local, "replay", None)
