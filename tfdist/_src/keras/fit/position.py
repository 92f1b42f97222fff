"""A position in the training data, between two steps."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

from tfdist._src.data.replay import Replay, RowsRead
from tfdist._src.internals.iterators import (
    has_seeds,
    new_iterator,
    set_position,
    shuffles_per_epoch,
)
from tfdist._src.internals.keras import is_of_one_generator
from tfdist._src.internals.tensorflow import discard_next
from tfdist.errors import SnapshotError


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
