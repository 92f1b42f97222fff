"""How large batches are, and how many an epoch has, if that depends on the number of workers."""

from __future__ import annotations

from collections.abc import Callable

from tfdist._src.data.replay import Replay, RowsRead
from tfdist._src.keras.fit.position import KeptRows


class BatchSize:
    """The size of batches of which each worker's part keeps its number of rows.

    Args:
        replay: what the data passes through.
        workers: returns the number of workers now.

    Attributes:
        own_batches: how many batches of the dataset's own an iterator has; None if unknown.
    """

    def __init__(self, replay: Replay, workers: Callable[[], int]) -> None:
        self._replay, self._workers = replay, workers
        self.own_batches: int | None = None

    @property
    def is_kept(self) -> bool:
        """Whether this is so; otherwise batches are the dataset's own."""
        return self._replay.keeps_rows and self._replay.is_used

    @property
    def rows(self) -> int:
        """The rows of a batch now; 0 if that is not known."""
        return self._replay.batch_for(self._workers()) if self.is_kept else 0

    def left(self, read: RowsRead) -> int:
        """How many batches an iterator still gives, over a dataset of known length.

        Batches of the dataset's own may have less rows than the first, so until the last one has
        been read this may be too many.
        """
        assert self.own_batches is not None
        own = self.own_batches - read.batches
        if self.rows == self._replay.own_batch:
            return own + read.pending_batches
        return -(-(read.pending + own * self._replay.own_batch) // self.rows)

    def kept(self, read: RowsRead) -> KeptRows | None:
        """What another process needs to give the same batches from there."""
        if not self.is_kept:
            return None
        return KeptRows(self._replay.workers, self._replay.own_batch, read)

    def keep(self, rows: KeptRows) -> None:
        """Gives the same batches as another process."""
        self._replay.keep_rows(rows.workers, rows.batch)
