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
class OwnBatches:
    """What is known of such data.

    Attributes:
        generation: of the group for which the data has been distributed.
        count: how many batches an epoch has; None if that is unknown.
        is_shared_out: whether each group can share the data out anew; not what the user has
            distributed, nor what the workers of a single pipeline read, all of them the same.
    """

    generation: int = -1
    count: int | None = None
    is_shared_out: bool = False


@dataclass(frozen=True)
class KeptRows:
    """How large batches are where each worker's part of them keeps its number of rows.

    Attributes:
        workers: among how many workers a batch of the dataset's own is divided.
        batch: the rows of such a batch; 0 if none has been read.
        read: how much of the data the last iterator has read.
    """

    workers: int
    batch: int
    read: RowsRead


@dataclass(frozen=True)
class Position:
    """A position in the training data.

    Attributes:
        iterators: the number of iterators that have been made over the dataset, each of which
            shuffles in its own way.
        batches: the batches that have been taken from the last one.
        in_all: the batches that have been taken from all of them.
        steps_seen: Keras's count of the batches of the last one.
        goes_on: whether the next epoch goes on with the last one.
        at_epoch: the random states when the epoch began.
        state: the serialized iterator; None if it has to be skipped forward.
        fresh: what that was before its first batch, if it has been serialized. The state of an
            iterator that has read all lacks the seeds with which later ones shuffle. At the end of
            an epoch, what one was that had been made after that, and not been read.
        data: what the data was like.
        is_common: whether the state serves any worker, of however many that may become others.
        rows: how large batches are, if that depends on the number of workers.
        begun: whether the first batch of the last one has been compared among the workers.
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
    def has_own_batches(self) -> bool:
        """Whether the batches that have been taken are the dataset's own."""
        read = None if self.rows is None else self.rows.read
        return read is None or (read.batches, read.pending) == (self.batches, 0)

    def check_own_batches(self) -> None:
        """Checks that the dataset's own batches are read up to here.

        Raises:
            SnapshotError: some were of another size.
        """
        if not self.has_own_batches:
            raise SnapshotError(
                "The snapshot was taken where the number of workers had changed the size of "
                "batches, so what follows has to be drawn in the same way. Pass "
                'tfdist.callbacks.Elastic(batch="per_worker") on two workers or more, or choose '
                "another directory to train from the beginning."
            )

    def check_data(self, received: str) -> None:
        """Checks that this is a position in data that is like what has been received.

        Raises:
            SnapshotError: it was of another kind.
        """
        if self.data != received:
            raise SnapshotError(
                "The training data must be the same as when the snapshot was taken, in the middle "
                f"of an epoch. Received: {received}, where it was {self.data}. Pass the same "
                "dataset, or choose another directory."
            )

    def to_json(self) -> dict[str, Any]:
        """The position as a document, without `state` and `fresh`."""
        return dataclasses.asdict(dataclasses.replace(self, state=None, fresh=None))

    @classmethod
    def from_json(
        cls, document: dict[str, Any], state: bytes | None, fresh: bytes | None
    ) -> Position:
        """The position of `to_json`, with what that leaves out."""
        rows = document.get("rows")
        if rows is not None:
            rows = KeptRows(rows["workers"], rows["batch"], RowsRead(*rows["read"]))
        return cls(**{**document, "state": state, "fresh": fresh, "rows": rows})


def go_to(
    iterator: Any, position: Position, epochs: Any, replay: Replay | None
) -> tuple[int, float] | None:
    """Moves an iterator, which has just been made, to a position.

    Args:
        iterator: over the training data.
        position: where.
        epochs: Keras's epoch iterator.
        replay: draws the batches, where their size depends on the number of workers.

    Returns:
        The number of batches that had to be read to get there, and the seconds that it took; None
        if there was no need to.

    Raises:
        SnapshotError: the position is one in other data.
    """
    if position.state is not None:
        move_to(iterator, position.state)
        if position.fresh is not None and not has_seeds(position.state):
            move_to(new_iterator(epochs), position.fresh)
            for _ in range(shuffles_per_epoch(epochs.data_adapter) - 1):
                new_iterator(epochs)
        return None
    # Each iterator goes on with the same Python generator.
    one = is_of_one_generator(epochs.data_adapter)
    batches, began = position.in_all if one else position.batches, time.monotonic()
    if replay is not None and position.rows is not None:
        replay.skip(position.rows.read.given, lambda: discard_next(iterator))
    else:
        for _ in range(batches):
            discard_next(iterator)
    return batches, time.monotonic() - began


def move_to(iterator: Any, state: bytes) -> None:
    """Moves an iterator over the training data to a serialized one.

    Raises:
        SnapshotError: that one is of other data.
    """
    try:
        set_position(iterator, state)
    except ValueError as error:
        raise SnapshotError(
            f"The training data must be the same as when the snapshot was taken. Received: others "
            f"({error}). Pass the same dataset, or choose another directory."
        ) from error


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
        return self._epochs.data_adapter  # Keras sets it late.

    def of(self, iterator: Any) -> bytes | None:
        """The state of an iterator; None if it cannot be saved."""
        state = position_of(iterator) if self._is_small and self._is_complete else None
        if state is not None and len(state) > _LARGEST_BYTES:
            state, self._is_small = None, False
        return state

    @functools.cached_property
    def description(self) -> str:
        """What the data is like, to tell whether a position is one in it."""
        if is_of_arrays(self._adapter):
            return describe_arrays(self._adapter)
        dataset = self._adapter.get_tf_dataset()
        buffers = shuffle_buffers(dataset)
        shuffled = f", shuffled in buffers of {buffers}" if buffers else ""
        return f"batches of {dataset.element_spec}{shuffled}"

    @functools.cached_property
    def _is_complete(self) -> bool:
        """Whether an iterator has all state: what is drawn, or remembered, while it is read."""
        if is_of_arrays(self._adapter):  # Keras shuffles them at the beginning of an iterator.
            return True
        dataset = self._adapter.get_tf_dataset()
        # One of a cache that has been moved to its place loses elements when it is moved again.
        return not draws_numbers(dataset) and not caches(dataset)


class FirstIterator:
    """Has a dataset begin again, whose iterators each shuffle in another way than the one before.

    The dataset counts them for as long as this process has it. An iterator that is moved to the
    position of the first one moves this count, too.

    Args:
        is_needed: returns whether it may have to.
    """

    def __init__(self, is_needed: Callable[[], bool]) -> None:
        self._is_needed = is_needed
        self._is_made = self._is_known = False
        self._position: bytes | None = None

    def made(self, iterator: Any) -> None:
        """Takes note of a new iterator; the first one after `comes_again` becomes the first."""
        if self._is_made or not self._is_needed():
            return
        self._is_made = True
        if not self._is_known:
            self._position, self._is_known = position_of(iterator), True
        elif self._position is not None:
            move_to(iterator, self._position)

    def make(self, epochs: Any, count: int, read: int) -> None:
        """Makes later iterators shuffle as if there had been others.

        Args:
            epochs: Keras's epoch iterator.
            count: how many had been made.
            read: in how many epochs the data had been read.
        """
        adapter = epochs.data_adapter
        fills = count > 0 and remembers_epochs(adapter)
        for number in range(count + read * (shuffles_per_epoch(adapter) - 1)):
            iterator = new_iterator(epochs)
            self.made(iterator)
            while fills and number == 0 and take_next(iterator):
                pass  # A cache is filled by the first one, with what that draws.

    def follow(self, epochs: Any, position: Position, read: int) -> None:
        """Makes later iterators shuffle as those that come after an epoch.

        Args:
            epochs: Keras's epoch iterator.
            position: where the data stood at its end.
            read: the number of epochs that had ended.
        """
        if position.fresh is None:
            self.make(epochs, position.iterators, read)
            return
        iterator = new_iterator(epochs)
        self.made(iterator)
        move_to(iterator, position.fresh)

    def comes_again(self) -> None:
        """Has the next iterator be the first one again."""
        self._is_made = False

    def obstacle(self, adapter: Any) -> str:
        """Why the dataset of one of Keras's adapters cannot begin again; "" if it can."""
        if is_of_one_generator(adapter):
            return "the training data is a Python generator, which gives each batch once"
        if changes_between_epochs(adapter):
            return "the training data is a PyDataset that changes at the beginning or end of epochs"
        if not self._is_known or self._position is not None:
            return ""
        if not shuffles(adapter.get_tf_dataset()):
            return ""
        return "the training data is shuffled, and has an iterator that cannot be saved"
