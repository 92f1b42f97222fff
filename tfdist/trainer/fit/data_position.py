"""Where the training data of a call of `fit` stands, and going on from where it stood before."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tfdist.errors import SnapshotError
from tfdist.internals.iterators import (
    batches_seen,
    has_seeds,
    lasting_iterator,
    new_iterator,
    position_of,
    set_batches_seen,
    set_position,
)
from tfdist.internals.keras import is_of_arrays, is_of_one_generator
from tfdist.internals.tensorflow import discard_next
from tfdist.strategies.first_batch import draws_numbers
from tfdist.strategies.random_state import random_states, set_random_states
from tfdist.trainer.fit.live_data import LiveData

_LARGEST_BYTES = 256 << 20


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
            iterator that has read all lacks the seeds with which later ones shuffle.
    """

    iterators: int
    batches: int
    in_all: int
    steps_seen: int
    goes_on: bool
    at_epoch: dict[str, Any]
    state: bytes | None
    fresh: bytes | None


class TrainingData:
    """The data that a call of `fit` trains on.

    Attributes:
        live: goes on with the same iterators when `fit` is entered again; None if it never is.
        joins: whether the other workers have begun the epoch that is about to be resumed.
        resumed: whether an epoch has gone on from where another process left it.
        skipped: the number of batches that had to be read to get to a position, and the seconds
            that it took; None if the data was positioned.
    """

    def __init__(self) -> None:
        self._epochs: Any = None
        self._iterator: Any = None
        self._iterators = self._batches = self._in_all = 0
        self._at_epoch: dict[str, Any] = {}
        self._fresh: bytes | None = None
        self._resume_at: tuple[Position, int, Callable[[], object]] | None = None
        self.live: LiveData | None = None
        self.skipped: tuple[int, float] | None = None
        self.resumed = self.joins = False

    def belongs_to(self, epochs: Any) -> bool:
        """Whether this is the data of Keras's epoch iterator: the first that `fit` makes."""
        if self._epochs is None:
            self._epochs = epochs
        return self._epochs is epochs

    @property
    def batches_of_epoch(self) -> int | None:
        """The number of batches of an epoch, if it is known."""
        batches: int | None = self._epochs.num_batches
        return batches

    def enter_again(self) -> None:
        """Lets `fit` be entered again with this data."""
        self._epochs = None

    def iterator_is_made(self) -> None:
        """Counts an iterator over the dataset. Keras makes some that it never reads."""
        self._iterators += 1

    def epoch_begins(self) -> None:
        """Records the random states, from which an epoch can be read again."""
        self._at_epoch = random_states()

    def read(self, *, epoch_ends: bool) -> Position:
        """The position now, between two steps.

        Args:
            epoch_ends: whether all batches of the epoch have been trained.
        """
        epochs = self._epochs
        current = lasting_iterator(epochs) or self._iterator
        fresh = current is not None and current is not self._iterator
        goes_on = epochs.steps_per_epoch is not None and epoch_ends
        state = None
        if current is not None and (goes_on or not epoch_ends) and self._may_serialize:
            state = position_of(current)
        if state is not None and len(state) > _LARGEST_BYTES:
            state, self._may_serialize = None, False
        return Position(
            iterators=self._iterators,
            batches=0 if fresh else self._batches,
            in_all=self._in_all,
            steps_seen=batches_seen(epochs),
            goes_on=goes_on,
            at_epoch=self._at_epoch,
            state=state,
            fresh=None if state is None else self._fresh,
        )

    def read_trained(self, batches: int) -> Position:
        """The position behind the batches that have been trained, where one may wait to be.

        Args:
            batches: how many of the epoch that was read last have been trained.
        """
        assert self.live is not None
        position = self.read(epoch_ends=self.live.has_ended)
        if self.live.has_ended or not self.live.taken:
            return position
        taken = self.live.taken
        begun = batches - batches % self._epochs.steps_per_execution
        return dataclasses.replace(
            position,
            batches=position.batches - taken + batches,
            in_all=position.in_all - taken + batches,
            steps_seen=position.steps_seen - taken + begun,
        )

    def resume_between_epochs(self, position: Position, epoch: int) -> None:
        """Goes on behind the last batch of an epoch; called before the next one begins.

        Args:
            position: where the data stood.
            epoch: the number of epochs that have ended.
        """
        self._replay_epochs(position, epoch)
        if position.goes_on:
            self._resume_at = position, 0, lambda: None
            return
        self._make_iterators(position.iterators)
        self._count(position)

    def resume_within_epoch(
        self, position: Position, epoch: int, batch: int, ready: Callable[[], object]
    ) -> None:
        """Goes on within an epoch, once it has begun.

        Args:
            position: where the data stood.
            epoch: the number of epochs that have ended.
            batch: the number of batches of the epoch that have been trained.
            ready: called when the epoch has begun, before its next batch is trained.
        """
        self._replay_epochs(position, epoch)
        self._resume_at = position, batch, ready

    def advance(self, advance: Callable[[], Any], begun: Callable[[Any], object]) -> Any:
        """The next step of an epoch: the numbers of its first and last batch, and the iterator.

        Args:
            advance: Keras's.
            begun: called with each new iterator.
        """
        if self.live is not None and self.live.stops():
            raise StopIteration
        if self._resume_at is None:
            if self.live is not None:
                step, is_new = self.live.advance(advance, lambda one: self._with_new(one, begun))
                return self._taken(step) if is_new else step
            return self._taken(self._with_new(advance(), begun))
        position, batch, ready = self._resume_at
        self._resume_at, self.resumed = None, True
        self._make_iterators(position.iterators - 1)  # The last one is made now.
        step = advance()
        if not position.batches:  # What `begun` takes was not taken there either.
            self._move(step[-1], position)
        self._with_new(step, begun)
        if position.batches:
            self._move(step[-1], position)
        self.joins = False
        self._count(position)
        ready()
        each = self._epochs.steps_per_execution
        set_batches_seen(self._epochs, position.steps_seen - batch // each * each + each)
        while step[0] + each <= batch:
            step = advance()
        if self.live is not None:
            self.live.resume(step, batch)
        return self._taken(step)

    def _with_new(self, step: Any, begun: Callable[[Any], object]) -> Any:
        if step[-1] is not self._iterator:
            wanted = self._at_epoch and self._may_serialize
            self._fresh = position_of(step[-1]) if wanted else None
            begun(step[-1])
            self._iterator, self._batches = step[-1], 0
        return step

    def _taken(self, step: Any) -> Any:
        self._batches += self._epochs.steps_per_execution
        self._in_all += self._epochs.steps_per_execution
        return step

    def _count(self, position: Position) -> None:
        self._iterators, self._batches = position.iterators, position.batches
        self._in_all, self._at_epoch = position.in_all, position.at_epoch

    def _make_iterators(self, count: int) -> None:
        """Makes later iterators shuffle as if this many had been there before."""
        for _ in range(count):
            new_iterator(self._epochs)

    def _replay_epochs(self, position: Position, epoch: int) -> None:
        """Has the data do what it does at the end of each epoch, such as to shuffle."""
        for _ in range(epoch):
            self._epochs.data_adapter.on_epoch_end()
        set_random_states(position.at_epoch)

    def _move(self, iterator: Any, position: Position) -> None:
        if position.state is not None:
            _set_position(iterator, position.state)
            if position.fresh is not None and not has_seeds(position.state):
                _set_position(new_iterator(self._epochs), position.fresh)
            return
        # Each iterator goes on with the same Python generator.
        one = is_of_one_generator(self._epochs.data_adapter)
        batches, began = position.in_all if one else position.batches, time.monotonic()
        for _ in range(batches):
            discard_next(iterator)
        self.skipped = batches, time.monotonic() - began

    @functools.cached_property
    def _may_serialize(self) -> bool:
        """Whether an iterator has all state: no random numbers are drawn while it is read."""
        adapter = self._epochs.data_adapter
        # Keras's shuffle of arrays is drawn at the beginning of an iterator, which keeps it.
        return is_of_arrays(adapter) or not draws_numbers(adapter.get_tf_dataset())


def _set_position(iterator: Any, state: bytes) -> None:
    try:
        set_position(iterator, state)
    except ValueError as error:
        raise SnapshotError(
            f"The training data must be the same as when the snapshot was taken. Received: others "
            f"({error}). Pass the same dataset, or choose another directory."
        ) from error


class _Here(threading.local):
    data: TrainingData | None = None


_here = _Here()


@contextlib.contextmanager
def training_data() -> Iterator[TrainingData]:
    """Within this context, the data that this thread's `fit` trains on is `current_data()`."""
    outer, _here.data = _here.data, TrainingData()
    try:
        yield _here.data
    finally:
        _here.data = outer


def current_data() -> TrainingData | None:
    """The data of the `fit` that this thread is in, if anybody asks for its position."""
    return _here.data


def batches_done() -> int:
    """Of the batches of the step that Keras's loop is about to run, how many have been trained."""
    data = current_data()
    if data is None or data.live is None:
        return 0
    done, data.live.batches_done = data.live.batches_done, 0
    return done
