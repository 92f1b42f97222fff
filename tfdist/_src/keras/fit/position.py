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
    """Properties of data from which each worker reads separate batches.

    Attributes:
        generation: the generation of the group among which the data was last divided.
        count: the number of batches per epoch; None if unknown.
        is_shared_out: whether tfdist can divide the data again when the group changes. False if the
            user has distributed the data, or if all workers of a single pipeline read the same
            data.
    """

    generation: int = -1
    count: int | None = None
    is_shared_out: bool = False


@dataclass(frozen=True)
class KeptRows:
    """The size of the batches if the number of rows per worker stays the same in every group.

    Attributes:
        workers: the number of workers among which a batch of the dataset itself would be divided.
            This determines the number of rows per worker.
        batch: the number of rows of a batch of the dataset; 0 if no batch has been read.
        read: how much data the last iterator has read.
    """

    workers: int
    batch: int
    read: RowsRead


@dataclass(frozen=True)
class Position:
    """A position in the training data.

    Attributes:
        iterators: the number of iterators that have been created over the dataset. Each of them
            shuffles differently.
        batches: the number of batches taken from the last iterator.
        in_all: the number of batches taken from all iterators together.
        steps_seen: the number of batches that Keras has counted for the last iterator.
        goes_on: whether the next epoch continues to read the last iterator, as with
            `steps_per_epoch`.
        at_epoch: the states of the random generators at the beginning of the epoch.
        state: the serialized state of the last iterator; None if it cannot be saved. A new iterator
            must then skip the batches that have already been read.
        fresh: the serialized state of the last iterator before its first batch, if available. It is
            needed because the state of an exhausted iterator lacks the seeds for the shuffles of
            later iterators. At the end of an epoch, this is the state of a newer iterator that has
            not been read.
        data: a description of the data, to detect that other data is passed.
        is_common: whether `state` is valid on every worker, and with any number of workers.
        rows: the size of the batches, if it depends on the number of workers.
        begun: whether the workers have already compared the first batch of the last iterator.
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
        """Whether the batches taken so far are unchanged batches of the dataset."""
        read = None if self.rows is None else self.rows.read
        return read is None or (read.batches, read.pending) == (self.batches, 0)

    def check_dataset_batches(self) -> None:
        """Checks that the data before this position was read in unchanged batches of the dataset.

        Raises:
            SnapshotError: some batches had another size, because the number of workers had changed.
        """
        if not self.has_dataset_batches:
            raise SnapshotError(
                "The snapshot was taken after the number of workers had changed the size of "
                "batches, so the remaining data must be read the same way. Pass "
                'tfdist.callbacks.Elastic(batch="per_worker") on at least two workers, or choose '
                "another directory to train from the beginning."
            )

    def check_data(self, received: str) -> None:
        """Checks that the data passed to `fit` matches the data of this position.

        Raises:
            SnapshotError: the data has another description.
        """
        if self.data != received:
            raise SnapshotError(
                "The training data must be the same as when the snapshot was taken, in the middle "
                f"of an epoch. Received: {received}; the snapshot has {self.data}. Pass the same "
                "dataset, or choose another directory."
            )

    def to_json(self) -> dict[str, Any]:
        """Returns the position as a JSON document that omits `state` and `fresh`."""
        return dataclasses.asdict(dataclasses.replace(self, state=None, fresh=None))

    @classmethod
    def from_json(
        cls, document: dict[str, Any], state: bytes | None, fresh: bytes | None
    ) -> Position:
        """Creates a position from the result of `to_json` and the two states that it omits."""
        rows = document.get("rows")
        if rows is not None:
            rows = KeptRows(rows["workers"], rows["batch"], RowsRead(*rows["read"]))
        return cls(**{**document, "state": state, "fresh": fresh, "rows": rows})


def go_to(
    iterator: Any, position: Position, epochs: Any, replay: Replay | None
) -> tuple[int, float] | None:
    """Moves a new iterator to a position.

    Args:
        iterator: an iterator over the training data.
        position: the target position.
        epochs: Keras's epoch iterator.
        replay: controls the size of the batches, if it depends on the number of workers; else None.

    Returns:
        The number of batches that were read and discarded to reach the position, and the seconds
        that this took; None if the iterator was moved without reading batches.

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
    # If the data is a Python generator, all iterators read from it, so the batches of all iterators
    # must be skipped.
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
    """The current size of the batches, which may depend on the number of workers.

    Args:
        replay: the object that controls the batches of the data.
        workers: returns the current number of workers.

    Attributes:
        dataset_batches: the number of batches that the dataset itself has per iterator; None if
            unknown.
    """

    def __init__(self, replay: Replay, workers: Callable[[], int]) -> None:
        self._replay, self._workers = replay, workers
        self.dataset_batches: int | None = None

    @property
    def is_kept(self) -> bool:
        """Whether the number of rows per worker stays the same when the group changes."""
        return self._replay.keeps_rows and self._replay.is_used

    @property
    def rows(self) -> int:
        """The current number of rows of a batch; 0 if unknown."""
        return self._replay.batch_for(self._workers()) if self.is_kept else 0

    def left(self, read: RowsRead) -> int:
        """Returns the number of batches left in an iterator over a dataset of known length.

        The result assumes that all batches of the dataset are as large as the first one. It may be
        too high until the last batch of the dataset has been read.
        """
        assert self.dataset_batches is not None
        unread = self.dataset_batches - read.batches
        if self.rows == self._replay.dataset_batch:
            return unread + read.pending_batches
        return -(-(read.pending + unread * self._replay.dataset_batch) // self.rows)

    def kept(self, read: RowsRead) -> KeptRows | None:
        """Returns the state that another process needs to form the same batches from here on."""
        if not self.is_kept:
            return None
        return KeptRows(self._replay.workers, self._replay.dataset_batch, read)

    def keep(self, rows: KeptRows) -> None:
        """Makes this process form the same batches as the process that returned `rows`."""
        self._replay.keep_rows(rows.workers, rows.batch)


_LARGEST_BYTES = 256 << 20


class IteratorStates:
    """Serializes the states of iterators, unless the states are incomplete or too large.

    Args:
        epochs: Keras's epoch iterator over the data.
    """

    def __init__(self, epochs: Any) -> None:
        self._epochs = epochs
        self._is_small = True

    @property
    def _adapter(self) -> Any:
        return self._epochs.data_adapter  # Keras sets this attribute late.

    def of(self, iterator: Any) -> bytes | None:
        """Returns the serialized state of an iterator; None if it cannot be saved."""
        state = position_of(iterator) if self._is_small and self._is_complete else None
        if state is not None and len(state) > _LARGEST_BYTES:
            state, self._is_small = None, False
        return state

    @functools.cached_property
    def description(self) -> str:
        """A description of the data, to check whether a position belongs to this data."""
        if is_of_arrays(self._adapter):
            return describe_arrays(self._adapter)
        dataset = self._adapter.get_tf_dataset()
        buffers = shuffle_buffers(dataset)
        shuffled = f", shuffled in buffers of {buffers}" if buffers else ""
        return f"batches of {dataset.element_spec}{shuffled}"

    @functools.cached_property
    def _is_complete(self) -> bool:
        """Whether an iterator's state includes all its random draws and all cached elements."""
        if is_of_arrays(self._adapter):  # Keras shuffles arrays when an iterator begins.
            return True
        dataset = self._adapter.get_tf_dataset()
        # With a cache, the state cannot be used either: the iterator would lose elements if it was
        # moved a second time.
        return not draws_numbers(dataset) and not caches(dataset)


class FirstIterator:
    """Makes a dataset start from the beginning again, including its shuffles.

    Each iterator over a dataset may shuffle differently, because the dataset counts its iterators
    as long as it exists in this process. If a new iterator is moved to the start of the first
    iterator, this count is reset as well.

    Args:
        is_needed: returns whether the dataset may have to start from the beginning again.
    """

    def __init__(self, is_needed: Callable[[], bool]) -> None:
        self._is_needed = is_needed
        self._is_made = self._is_known = False
        self._position: bytes | None = None

    def made(self, iterator: Any) -> None:
        """Records a new iterator. After `comes_again`, moves it to the first iterator's start."""
        if self._is_made or not self._is_needed():
            return
        self._is_made = True
        if not self._is_known:
            self._position, self._is_known = position_of(iterator), True
        elif self._position is not None:
            move_to(iterator, self._position)

    def make(self, epochs: Any, count: int, read: int) -> None:
        """Creates iterators, so that later iterators shuffle as they would after these iterators.

        Args:
            epochs: Keras's epoch iterator.
            count: the number of iterators that had been created when the position was saved.
            read: the number of epochs in which the data was read.
        """
        adapter = epochs.data_adapter
        fills = count > 0 and remembers_epochs(adapter)
        for number in range(count + read * (shuffles_per_epoch(adapter) - 1)):
            iterator = new_iterator(epochs)
            self.made(iterator)
            while fills and number == 0 and take_next(iterator):
                pass  # The first iterator fills the cache with the elements that it draws.

    def follow(self, epochs: Any, position: Position, read: int) -> None:
        """Makes later iterators shuffle as they would after the epoch that ended at a position.

        Args:
            epochs: Keras's epoch iterator.
            position: the position at the end of the epoch.
            read: the number of epochs in which the data was read.
        """
        if position.fresh is None:
            self.make(epochs, position.iterators, read)
            return
        iterator = new_iterator(epochs)
        self.made(iterator)
        move_to(iterator, position.fresh)

    def comes_again(self) -> None:
        """Makes the next iterator begin like the first iterator."""
        self._is_made = False

    def obstacle(self, adapter: Any) -> str:
        """Returns why an adapter's dataset cannot start from the beginning again; "" if it can."""
        if is_of_one_generator(adapter):
            return "the training data is a Python generator, which gives each batch once"
        if changes_between_epochs(adapter):
            return "the training data is a PyDataset that changes at the beginning or end of epochs"
        if not self._is_known or self._position is not None:
            return ""
        if not shuffles(adapter.get_tf_dataset()):
            return ""
        return "the training data is shuffled, and has an iterator that cannot be saved"
