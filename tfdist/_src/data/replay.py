"""Which batches a dataset gives: the last one again, if no step stands for it, or larger ones."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from tfdist._src import native

T = TypeVar("T")


class RowsRead(NamedTuple):
    """How much of a dataset an iterator has read.

    Attributes:
        batches: of the dataset's own batches.
        rows: their rows.
        pending: of these, how many are still to be given.
        pending_batches: in how many of the dataset's own batches these are.
    """

    batches: int = 0
    rows: int = 0
    pending: int = 0
    pending_batches: int = 0

    @property
    def given(self) -> int:
        """The rows that have been given."""
        return self.rows - self.pending


class Replay:
    """Says what the datasets that pass through this give next.

    The last batch once more, if no step stands for it. And if a worker's part of a batch is to have
    as many rows as before in another group, batches that are drawn anew from the dataset's rows, in
    their order. This happens inside the iterator, so that what reads it need not know. What follows
    in the input pipeline must not read ahead. Datasets refer to it by its number; see
    `shares.split_batches`.

    Args:
        keeps_rows: whether a worker's part of a batch keeps its number of rows.

    Attributes:
        number: the core's number of it.
        keeps_rows: as given.
        is_used: whether a dataset passes through it; not if each worker has batches of its own.
        has_whole: whether it can give a worker whole batches.
    """

    def __init__(self, *, keeps_rows: bool = False) -> None:
        self._core = native.load().library
        number = ctypes.c_int64()
        self._core.tfd_replay_create(ctypes.byref(number))
        self.number, self.keeps_rows = number.value, keeps_rows
        self._workers = 0
        self.is_used = self.has_whole = False
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

    def show_next(self, take_next: Callable[[], T]) -> T:
        """Lets this worker see the whole next batch, which is then given as if it had not.

        Args:
            take_next: takes a batch; returns something false if there is none.

        Returns:
            What `take_next` does.
        """
        self._core.tfd_replay_give_whole(self.number, True)
        try:
            batch = take_next()
        finally:
            self._core.tfd_replay_give_whole(self.number, False)
        if batch:
            self.request()
        return batch

    def keep_rows(self, workers: int, batch: int = 0) -> None:
        """Keeps the number of rows that a worker has of one of the dataset's own batches.

        Args:
            workers: among how many workers that is divided.
            batch: its rows; 0 for those of the first batch that is read.
        """
        self._workers = workers
        self._core.tfd_replay_keep_rows(self.number, workers, batch)

    @property
    def workers(self) -> int:
        """Among how many workers one of the dataset's own batches is divided; 0 for any number."""
        return self._workers

    @property
    def own_batch(self) -> int:
        """The rows of the dataset's own batches; 0 if none is known yet."""
        return self._batch(1)[0]

    def batch_for(self, workers: int) -> int:
        """The rows of a batch for a number of workers; 0 if none is known yet."""
        return self._batch(workers)[1]

    def _batch(self, workers: int) -> tuple[int, int]:
        own, rows = ctypes.c_int64(), ctypes.c_int64()
        self._core.tfd_replay_batch(self.number, workers, ctypes.byref(own), ctypes.byref(rows))
        return own.value, rows.value

    def skip(self, rows: int, discard_next: Callable[[], object]) -> None:
        """Leaves out the next rows.

        Args:
            rows: how many.
            discard_next: takes the next batch.
        """
        while rows:
            some = min(rows, max(1, self.own_batch))
            self._core.tfd_replay_want(self.number, some)
            discard_next()
            rows -= some

    def read(self, *, before_last: bool = False) -> RowsRead:
        """What the iterator that was read last has read.

        Args:
            before_last: whether its last batch counts as not given.
        """
        counts = [ctypes.c_int64() for _ in range(4)]
        self._core.tfd_replay_rows(self.number, before_last, *map(ctypes.byref, counts))
        return RowsRead(*(count.value for count in counts))


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
