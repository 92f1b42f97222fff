"""Tracks the position in the training data, and restores it."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from tfdist._src.data.call_context import current_context, entered
from tfdist._src.data.shares import RowsRead
from tfdist._src.internals import iterators
from tfdist._src.keras.fit.position import (
    BatchSize,
    FirstIterator,
    IteratorStates,
    KeptRows,
    Position,
    SeparateBatches,
    go_to,
)
from tfdist._src.keras.fit.reentry import Reentry
from tfdist._src.keras.fit.validation_data import ValidationData
from tfdist._src.strategy.multi_worker import random_states, set_random_states


class TrainingData:
    """The data that a call of `fit` trains on.

    Attributes:
        reentry: continues with the same iterators when `fit` is entered again; None if `fit` is
            entered only once.
        validation: tracks the validation data; None if the position in it is not needed.
        iterators: the number of iterators that have been created over the dataset. Each of them
            shuffles differently. The number includes iterators that Keras never reads.
        separate: describes data from which the workers read separate batches; None if all workers
            divide the same batches.
        joins: whether this worker joins an epoch that the other workers have already begun.
        first_epoch: the `initial_epoch` of this call of `fit`.
        resumed: whether this process has continued an epoch that another process had begun.
        skipped: the number of batches that were read and discarded to reach a position, and the
            seconds that this took; None if no batches were discarded.
    """

    def __init__(self) -> None:
        self.reentry: Reentry | None = None
        self.validation: ValidationData | None = None
        self.separate: SeparateBatches | None = SeparateBatches()
        self._first = FirstIterator(lambda: self.reentry is not None)
        self.first_epoch = 0
        self._last_epochs: Any = None  # Keras's epoch iterator since the last entry
        self._begin()

    def _begin(self) -> None:
        self._epochs: Any = None
        self._iterator: Any = None
        self.iterators = self._batches = self._in_all = 0
        self._at_epoch: dict[str, Any] = {}
        self._fresh: bytes | None = None
        self._resume_at: tuple[Position, int, int, Callable[[], object]] | None = None
        self.skipped: tuple[int, float] | None = None
        self.resumed = self.joins = False

    def belongs_to(self, epochs: Any) -> bool:
        """Whether a Keras epoch iterator reads the training data.

        The first epoch iterator for which this method is called in an entry of `fit` does so.
        """
        if self._epochs is None:
            self._epochs = self._last_epochs = epochs
            self._states = IteratorStates(epochs)
        return self._epochs is epochs

    @property
    def batches_of_epoch(self) -> int | None:
        """The number of batches of an epoch, if known."""
        return self._epochs.num_batches  # type: ignore[no-any-return]

    @property
    def batch_size(self) -> BatchSize | None:
        """The size of the batches if it depends on the number of workers, else None."""
        size = None if self.reentry is None else self.reentry.batch_size
        return size if size is not None and size.is_kept else None

    def enter_epoch(self, epoch: int) -> None:
        """Records the epoch that Keras's loop enters."""
        if self.reentry is not None:
            self.reentry.epoch = epoch
        self.update_length()

    def update_length(self) -> None:
        """Makes Keras expect the number of batches that the epoch has in the current group."""
        if self.batch_size is None or self.reentry is None:
            return
        number = self.reentry.batches_to_count()
        if self._resume_at is not None:
            position = self._resume_at[0]
            read = position.rows.read if position.rows else RowsRead(position.batches)
            known = self.batch_size.dataset_batches is not None
            number = position.batches + self.batch_size.left(read) if known else None
        iterators.set_number_of_batches(self._epochs, number)

    def follow(self, position: Position, *, anew: bool = False) -> None:
        """Makes the batches have the same size as at a position.

        Args:
            position: the position in the data.
            anew: whether the next epoch reads the data from the beginning, so that the size at the
                position need not be possible.

        Raises:
            SnapshotError: this call of `fit` cannot form batches of that size.
        """
        if position.rows is not None and self.batch_size is not None:
            self.batch_size.keep(position.rows)
        elif not anew:
            position.check_dataset_batches()

    def enter_again(self) -> None:
        """Prepares this data for another entry of `fit`."""
        self._epochs = None

    @property
    def obstacle(self) -> str:
        """The reason why this process cannot read its data again from the start; "" if it can."""
        return "" if self._last_adapter is None else self._first.obstacle(self._last_adapter)

    @property
    def _last_adapter(self) -> Any:
        return getattr(self._last_epochs, "data_adapter", None)  # None until Keras sets it

    def begin_anew(self) -> None:
        """Makes the next entry of `fit` read the data from the beginning, as in a new process."""
        iterators.stop_reading(self._last_adapter)
        self._first.comes_again()
        if self.validation is not None:
            self.validation.begin_anew()
        self._begin()

    @property
    def adapter(self) -> Any:
        """Keras's data adapter."""
        return self._epochs.data_adapter

    @property
    def batches_before(self) -> int:
        """The number of batches already trained in the epoch that is about to be resumed."""
        return 0 if self._resume_at is None else self._resume_at[2]

    def epoch_begins(self) -> None:
        """Records the random states that are needed to read the epoch again."""
        self._at_epoch = random_states()

    def read(self, *, epoch_ends: bool) -> Position:
        """Returns the current position. This method must be called between two steps.

        Args:
            epoch_ends: whether all batches of the epoch have been trained.
        """
        epochs = self._epochs
        current = iterators.lasting_iterator(epochs) or self._iterator
        fresh = current is not None and current is not self._iterator
        goes_on = epochs.steps_per_epoch is not None and epoch_ends
        readable = current is not None and (goes_on or not epoch_ends)
        state = self._states.of(current) if readable else None
        fresh_state = None if state is None else self._fresh
        if epoch_ends and not goes_on:
            shares = self.validation is not None and self.validation.shares_shuffles
            unread = None if shares else iterators.unread_iterator(epochs, self._iterator)
            fresh_state = None if unread is None else self._states.of(unread)
        return Position(
            iterators=self.iterators,
            batches=0 if fresh else self._batches,
            in_all=self._in_all,
            steps_seen=iterators.batches_seen(epochs),
            goes_on=goes_on,
            at_epoch=self._at_epoch,
            state=state,
            fresh=fresh_state,
            is_common=self.reentry is not None and self.separate is None,
            rows=self._rows(
                RowsRead() if fresh or self.reentry is None else self.reentry.replay.read()
            ),
            begun=current is not None and not fresh,
            data=self._states.description,
        )

    def read_trained(self, batches: int) -> Position:
        """Returns the position after the trained batches, even if the next batch has been read.

        Args:
            batches: the number of trained batches of the last epoch from which batches were read.
        """
        assert self.reentry is not None
        position = self.read(epoch_ends=self.reentry.has_ended)
        if self.reentry.has_ended or not self.reentry.taken:
            return position
        taken = self.reentry.taken
        counted = taken - self.reentry.uncounted
        read = self.reentry.replay.read(before_last=self.reentry.has_untrained(batches))
        begun = batches - batches % self._epochs.steps_per_execution
        return dataclasses.replace(
            position,
            batches=position.batches - counted + batches,
            in_all=position.in_all - counted + batches,
            steps_seen=position.steps_seen - taken + begun,
            rows=self._rows(read),
        )

    def resume_between_epochs(self, position: Position, epoch: int) -> None:
        """Moves to a position at the end of an epoch. Called before the next epoch begins.

        Args:
            position: the position in the data.
            epoch: the number of epochs that have ended.
        """
        epochs = self._replay_epochs(position, epoch)
        self.follow(position, anew=not position.goes_on)
        if position.goes_on:
            self._resume_at = position, epochs, 0, lambda: None
            return
        self._first.follow(self._epochs, position, epochs)
        self._count(position)

    def resume_within_epoch(
        self, position: Position, epoch: int, batch: int, ready: Callable[[], object]
    ) -> None:
        """Makes the next epoch begin at a position within this epoch.

        Args:
            position: the position in the data.
            epoch: the number of epochs that have ended.
            batch: the number of batches that have been trained in the epoch of the position.
            ready: called when the position has been reached, before the next batch is trained.
        """
        epochs = self._replay_epochs(position, epoch)
        self.follow(position)
        if not self.joins:
            position.check_data(self._states.description)
        self._resume_at = position, epochs, batch, ready

    def advance(self, advance: Callable[[], Any], begun: Callable[[Any], object]) -> Any:
        """Returns an epoch's next step: the indices of its first and last batch, and the iterator.

        Args:
            advance: Keras's function that returns the next step.
            begun: called with each new iterator.
        """
        if self.reentry is not None and self.reentry.stops():
            raise StopIteration
        if self._resume_at is None:
            if self.reentry is not None:
                step, is_new = self.reentry.advance(advance, lambda one: self._with_new(one, begun))
                return self._taken(step) if is_new else step
            return self._taken(self._with_new(advance(), begun))
        position, epochs, batch, ready = self._resume_at
        self._resume_at, self.resumed = None, True
        # `advance` below creates the last of these iterators.
        self._first.make(self._epochs, position.iterators - 1, epochs)
        step = advance()
        self._first.made(step[-1])
        # If `begun` had been called before the position was saved, it must be called here as well,
        # before the iterator is moved. Otherwise, it is called afterwards.
        if position.batches or position.begun:
            self._with_new(step, begun)
        replay = self.reentry.replay if self.reentry is not None and self.batch_size else None
        if self.separate is None or not (self.joins and self.separate.is_shared_out):
            self.skipped = go_to(step[-1], position, self._epochs, replay)
        self._with_new(step, begun)
        self.joins = False
        self._count(position)
        ready()
        each = self._epochs.steps_per_execution
        iterators.set_batches_seen(self._epochs, position.steps_seen - batch // each * each + each)
        while step[0] + each <= batch:
            step = advance()
        if self.reentry is not None:
            self.reentry.resume(step, batch)
        return self._taken(step)

    def _rows(self, read: RowsRead) -> KeptRows | None:
        return None if self.batch_size is None else self.batch_size.kept(read)

    def _with_new(self, step: Any, begun: Callable[[Any], object]) -> Any:
        if step[-1] is not self._iterator:
            self._first.made(step[-1])
            self._fresh = self._states.of(step[-1]) if self._at_epoch else None
            self._iterator, self._batches = step[-1], 0
            begun(step[-1])
        return step

    def _taken(self, step: Any) -> Any:
        self._batches += self._epochs.steps_per_execution
        self._in_all += self._epochs.steps_per_execution
        return step

    def _count(self, position: Position) -> None:
        self.iterators, self._batches = position.iterators, position.batches
        self._in_all, self._at_epoch = position.in_all, position.at_epoch

    def _replay_epochs(self, position: Position, epoch: int) -> int:
        """Repeats the effects of past epochs on the data; returns the number of these epochs."""
        epochs = max(epoch - self.first_epoch, 0)
        iterators.replay_epochs(self._epochs.data_adapter, epochs)
        set_random_states(position.at_epoch)
        return epochs


@contextlib.contextmanager
def tracked_data() -> Iterator[TrainingData]:
    """Creates the `TrainingData` that `current_data()` returns in this context."""
    data = TrainingData()
    with entered(dataclasses.replace(current_context(), training_data=data)):
        yield data


def current_data() -> TrainingData | None:
    """Returns the training data of this thread's `fit`, if it is tracked; else None."""
    data = current_context().training_data
    return data if isinstance(data, TrainingData) else None


def take_batches_done() -> int:
    """Returns, and resets, the number of batches in Keras's next step that are already trained."""
    data = current_data()
    if data is None or data.reentry is None:
        return 0
    done, data.reentry.batches_done = data.reentry.batches_done, 0
    return done
