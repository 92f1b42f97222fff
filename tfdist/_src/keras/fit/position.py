"""Positions in the training data, between two steps."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tfdist._src.data.first_batch import draws_numbers
from tfdist._src.data.shares import Replay, RowsRead
from tfdist._src.internals.datasets import caches, shuffle_buffers, shuffles
from tfdist._src.internals.iterators import (
    changes_between_epochs,
    has_seeds,
    new_iterator,
    position_of,
    remembers_epochs,
    set_position,
    shuffles_per_epoch,
)
from tfdist._src.internals.keras import describe_arrays, is_of_arrays, is_of_one_generator
from tfdist._src.internals.tensorflow import discard_next, take_next
from tfdist.errors import SnapshotError


@dataclass(frozen=True)
class SeparateBatches:
    """Properties of data that each worker reads separately.

    Attributes:
        generation: the generation of the group for which the data was distributed.
        count: the number of batches per epoch; None if unknown.
        is_shared_out: whether each new group can divide the data again. False for data that the
            user has distributed, and for data that all workers of a single pipeline read.
    """

    generation: int = -1
    count: int | None = None
    is_shared_out: bool = False


@dataclass(frozen=True)
class KeptRows:
    """The size of batches if each worker keeps its number of rows per batch.

    Attributes:
        workers: the number of workers that divide one of the dataset's own batches.
        batch: the number of rows of such a batch; 0 if none has been read.
        read: the amount of data that the last iterator has read.
    """

    workers: int
    batch: int
    read: RowsRead


@dataclass(frozen=True)
class Position:
    """A position in the training data.

    Attributes:
        iterators: the number of iterators made over the dataset; each shuffles differently.
        batches: the number of batches taken from the last iterator.
        in_all: the number of batches taken from all iterators.
        steps_seen: Keras's count of the last iterator's batches.
        goes_on: whether the next epoch continues with the last iterator.
        at_epoch: the random states when the epoch began.
        state: the serialized iterator; None if an iterator must be skipped forward instead.
        fresh: the iterator serialized before its first batch, if available, because the state of
            an exhausted iterator lacks the seeds for the shuffles of later iterators. At the end
            of an epoch, this is the state of a newer iterator that has not been read.
        data: a description of the data.
        is_common: whether the state is valid on any worker, regardless of the number of workers.
        rows: the size of batches, if it depends on the number of workers.
        begun: whether the workers have compared the first batch of the last iterator.
    """

    iterators: int
    batches: int
    in_all: int
    steps_seen: int
    goes_on: bool
    at_epoch: dict[str, Any]
    state: bytes | None
    fresh: bytes | None
    data: str
    is_common: bool = False
    rows: KeptRows | None = None
    begun: bool = False

    @property
    def has_dataset_batches(self) -> bool:
        """Whether the batches taken so far are the dataset's own."""
        read = None if self.rows is None else self.rows.read
        return read is None or (read.batches, read.pending) == (self.batches, 0)

    def check_dataset_batches(self) -> None:
        """Checks that the data up to here was read in the dataset's own batches.

        Raises:
            SnapshotError: some batches had a different size.
        """
        if not self.has_dataset_batches:
            raise SnapshotError(
                "The snapshot was taken after the number of workers had changed the size of "
                "batches, so the remaining data must be read the same way. Pass "
                'tfdist.callbacks.Elastic(batch="per_worker") on at least two workers, or choose '
                "another directory to train from the beginning."
            )

    def check_data(self, received: str) -> None:
        """Checks that the received data matches the data of this position.

        Raises:
            SnapshotError: the data is of another kind.
        """
        if self.data != received:
            raise SnapshotError(
                "The training data must be the same as when the snapshot was taken, in the middle "
                f"of an epoch. Received: {received}; the snapshot has {self.data}. Pass the same "
                "dataset, or choose another directory."
            )

    def to_json(self) -> dict[str, Any]:
        """The position as a JSON document, without `state` and `fresh`."""
        return dataclasses.asdict(dataclasses.replace(self, state=None, fresh=None))

    @classmethod
    def from_json(
        cls, document: dict[str, Any], state: bytes | None, fresh: bytes | None
    ) -> Position:
        """The position from the document of `to_json`, and the two states that it omits."""
        rows = document.get("rows")
        if rows is not None:
            rows = KeptRows(rows["workers"], rows["batch"], RowsRead(*rows["read"]))
        return cls(**{**document, "state": state, "fresh": fresh, "rows": rows})


def go_to(
    iterator: Any, position: Position, epochs: Any, replay: Replay | None
) -> tuple[int, float] | None:
    """Moves a newly made iterator to a position.

    Args:
        iterator: an iterator over the training data.
        position: the target position.
        epochs: Keras's epoch iterator.
        replay: draws the batches, if their size depends on the number of workers.

    Returns:
        The number of batches that had to be read to reach the position, and the seconds that this
        took; None if nothing had to be read.

    Raises:
        SnapshotError: the position belongs to other data.
    """
    if position.state is not None:
        move_to(iterator, position.state)
        if position.fresh is not None and not has_seeds(position.state):
            move_to(new_iterator(epochs), position.fresh)
            for _ in range(shuffles_per_epoch(epochs.data_adapter) - 1):
                new_iterator(epochs)
        return None
    # All iterators read from the same Python generator.
    one = is_of_one_generator(epochs.data_adapter)
    batches, began = position.in_all if one else position.batches, time.monotonic()
    if replay is not None and position.rows is not None:
        replay.skip(position.rows.read.given, lambda: discard_next(iterator))
    else:
        for _ in range(batches):
            discard_next(iterator)
    return batches, time.monotonic() - began


def move_to(iterator: Any, state: bytes) -> None:
    """Moves an iterator over the training data to the position of a serialized iterator.

    Raises:
        SnapshotError: the serialized iterator belongs to other data.
    """
    try:
        set_position(iterator, state)
    except ValueError as error:
        raise SnapshotError(
            "The training data must be the same as when the snapshot was taken. Received: "
            f"different data ({error}). Pass the same dataset, or choose another directory."
        ) from error


class BatchSize:
    """The size of batches if each worker keeps its number of rows per batch.

    Args:
        replay: the object that controls the batches of the data.
        workers: returns the current number of workers.

    Attributes:
        dataset_batches: the number of the dataset's own batches per iterator; None if unknown.
    """

    def __init__(self, replay: Replay, workers: Callable[[], int]) -> None:
        self._replay, self._workers = replay, workers
        self.dataset_batches: int | None = None

    @property
    def is_kept(self) -> bool:
        """Whether workers keep their rows; otherwise, the batches are the dataset's own."""
        return self._replay.keeps_rows and self._replay.is_used

    @property
    def rows(self) -> int:
        """The current number of rows of a batch; 0 if unknown."""
        return self._replay.batch_for(self._workers()) if self.is_kept else 0

    def left(self, read: RowsRead) -> int:
        """The number of batches left in an iterator over a dataset of known length.

        The dataset's own batches may have fewer rows than the first, so the number may be too high
        until the last one has been read.
        """
        assert self.dataset_batches is not None
        unread = self.dataset_batches - read.batches
        if self.rows == self._replay.dataset_batch:
            return unread + read.pending_batches
        return -(-(read.pending + unread * self._replay.dataset_batch) // self.rows)

    def kept(self, read: RowsRead) -> KeptRows | None:
        """The state that another process needs to produce the same batches from here."""
        if not self.is_kept:
            return None
        return KeptRows(self._replay.workers, self._replay.dataset_batch, read)

    def keep(self, rows: KeptRows) -> None:
        """Produces the same batches as another process."""
        self._replay.keep_rows(rows.workers, rows.batch)


_LARGEST_BYTES = 256 << 20


class IteratorStates:
    """Saves iterators, unless their states are incomplete or too large.

    Args:
        epochs: Keras's epoch iterator over the data.
    """

    def __init__(self, epochs: Any) -> None:
        self._epochs = epochs
        self._is_small = True

    @property
    def _adapter(self) -> Any:
        return self._epochs.data_adapter  # Read on each use: Keras sets it late.

    def of(self, iterator: Any) -> bytes | None:
        """The state of an iterator; None if it cannot be saved."""
        state = position_of(iterator) if self._is_small and self._is_complete else None
        if state is not None and len(state) > _LARGEST_BYTES:
            state, self._is_small = None, False
        return state

    @functools.cached_property
    def description(self) -> str:
        """A description of the data, to check whether a position belongs to it."""
        if is_of_arrays(self._adapter):
            return describe_arrays(self._adapter)
        dataset = self._adapter.get_tf_dataset()
        buffers = shuffle_buffers(dataset)
        shuffled = f", shuffled in buffers of {buffers}" if buffers else ""
        return f"batches of {dataset.element_spec}{shuffled}"

    @functools.cached_property
    def _is_complete(self) -> bool:
        """Whether an iterator's state includes everything drawn or cached while it is read."""
        if is_of_arrays(self._adapter):  # Keras shuffles them at the beginning of an iterator.
            return True
        dataset = self._adapter.get_tf_dataset()
        # An iterator over a cache loses elements if it is moved a second time.
        return not draws_numbers(dataset) and not caches(dataset)


class FirstIterator:
    """Restarts a dataset if each of its iterators shuffles differently from the previous one.

    The dataset counts its iterators as long as this process holds the dataset. Moving an iterator
    to the position of the first one also resets this count.

    Args:
        is_needed: returns whether a restart may be needed.
    """

    def __init__(self, is_needed: Callable[[], bool]) -> None:
        self._is_needed = is_needed
        self._is_made = self._is_known = False
        self._position: bytes | None = None

    def made(self, iterator: Any) -> None:
        """Records a new iterator; after `comes_again`, moves it to the first one's position."""
        if self._is_made or not self._is_needed():
            return
        self._is_made = True
        if not self._is_known:
            self._position, self._is_known = position_of(iterator), True
        elif self._position is not None:
            move_to(iterator, self._position)

    def make(self, epochs: Any, count: int, read: int) -> None:
        """Makes later iterators shuffle as if other iterators had been made before.

        Args:
            epochs: Keras's epoch iterator.
            count: the number of these other iterators.
            read: the number of epochs for which the data was read.
        """
        adapter = epochs.data_adapter
        fills = count > 0 and remembers_epochs(adapter)
        for number in range(count + read * (shuffles_per_epoch(adapter) - 1)):
            iterator = new_iterator(epochs)
            self.made(iterator)
            while fills and number == 0 and take_next(iterator):
                pass  # The first iterator fills the cache with the elements that it draws.

    def follow(self, epochs: Any, position: Position, read: int) -> None:
        """Makes later iterators shuffle as they would after an epoch.

        Args:
            epochs: Keras's epoch iterator.
            position: the position at the end of the epoch.
            read: the number of epochs that had ended.
        """
        if position.fresh is None:
            self.make(epochs, position.iterators, read)
            return
        iterator = new_iterator(epochs)
        self.made(iterator)
        move_to(iterator, position.fresh)

    def comes_again(self) -> None:
        """Makes the next iterator begin like the first one."""
        self._is_made = False

    def obstacle(self, adapter: Any) -> str:
        """The reason why an adapter's dataset cannot be restarted; "" if it can."""
        if is_of_one_generator(adapter):
            return "the training data is a Python generator, which gives each batch once"
        if changes_between_epochs(adapter):
            return "the training data is a PyDataset that changes at the beginning or end of epochs"
        if not self._is_known or self._position is not None:
            return ""
        if not shuffles(adapter.get_tf_dataset()):
            return ""
        return "the training data is shuffled, and has an iterator that cannot be saved"
