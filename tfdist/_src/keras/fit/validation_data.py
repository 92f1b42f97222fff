"""Tracks the validation data of a call of `fit`.

Each validation reads its data with a new iterator, which may shuffle differently from the previous
one. If a validation is repeated because a worker was lost, it reads the same data again. Workers
that join read the same data as the other workers. A resumed training run continues with the
validation data that the interrupted run would have read next.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from tfdist._src.internals.iterators import (
    draw_together,
    draws_anew,
    forget_validation_data,
    new_iterator,
    position_of,
    set_position,
    validation_epochs,
)
from tfdist._src.internals.keras import made_under
from tfdist._src.strategy.extended import extended_of


class NextValidation(NamedTuple):
    """The data that the next validation reads.

    Attributes:
        position: the serialized start of an iterator; None if no iterator has been created, or if
            its position cannot be saved.
        again: whether the next validation begins at this position. If not, it reads an iterator
            that was created later.
        made: the number of iterators that were created after the iterator that begins at this
            position.
    """

    position: bytes | None = None
    again: bool = False
    made: int = 0


class TrainingIterators(Protocol):
    """Iterators over the training data.

    Attributes:
        iterators: the number of iterators that have been created so far. Each of them shuffles
            differently.
    """

    iterators: int

    @property
    def adapter(self) -> Any:
        """Keras's data adapter."""


class ValidationData:
    """Makes validation in `fit` read the same rows even if workers fail or join.

    Args:
        model: the model in training.
        broadcast: sends bytes from one rank to all workers. All workers must call it.
    """

    def __init__(self, model: Any, broadcast: Callable[[bytes, int], bytes]) -> None:
        self._model, self._broadcast = model, broadcast
        self._begins = self._came = self._lacks = False
        self._entered = self._epoch = -1  # the current epoch; the epoch of `_beginning`
        self._shuffles: bool | None = None
        self._common = False  # whether the data shares a shuffle with the training data
        self._first: bytes | None = None  # the start of the first iterator
        self._beginning: bytes | None = None  # the start of the last validation
        self._again: bytes | None = None  # the start of the next validation, if known
        self._before: NextValidation | None = None  # see `NextValidation`
        self._made = 0  # the number of iterators in the last validation
        self._made_before = 0  # the number of training iterators before it

    def belongs_to(self, epochs: Any) -> bool:
        """Whether a Keras epoch iterator reads the validation data of `fit`."""
        return validation_epochs(self._model) is epochs

    def begins(self, epochs: Any, training: TrainingIterators, epoch: int) -> None:
        """Begins the validation of an epoch, with a new iterator.

        Args:
            epochs: Keras's epoch iterator.
            training: the training data.
            epoch: the number of the epoch.
        """
        self._begins, self._entered, self._made = True, epoch, 0
        if self._shuffles is None:
            adapter = epochs.data_adapter
            self._shuffles = draws_anew(adapter)
            self._common = draw_together(adapter, training.adapter)
        if self._again is None:
            self._made_before = training.iterators
        elif self._common:
            training.iterators = self._made_before

    def iterator_is_made(self, training: TrainingIterators) -> None:
        """Counts a new iterator over the data, even if Keras never reads this iterator."""
        self._made += 1
        training.iterators += self._common

    def step(self, epochs: Any, iterator: Any) -> None:
        """Moves the iterator to the start of the validation data if the next step is the first.

        This method must be called before each step.

        Args:
            epochs: Keras's epoch iterator.
            iterator: the iterator that the step reads.
        """
        if not self._begins:
            return
        self._begins, self._epoch = False, self._entered
        again, self._again = self._again, None
        before, self._before = self._before, None
        if self._shuffles:
            # If the training data has the same shuffle, the position in the training data also
            # determines this position.
            if before is not None and not self._common:
                made, again = self._made, _following(before, epochs, iterator)
                self._made = made
            self._beginning = again or position_of(iterator)
            if self._came:
                again = self._take_over(epochs, again)
            self._first = self._first or self._beginning
        self._came = self._lacks = False
        if again:
            set_position(iterator, again)

    def group_changes(self, epoch: int, *, is_new: bool, others_came: bool) -> None:
        """Makes Keras distribute the data again after a group change. All workers must call this.

        Args:
            epoch: the epoch that all workers enter. If its validation has begun, the validation is
                repeated.
            is_new: whether this worker has just joined.
            others_came: whether any worker has just joined.
        """
        self._lacks |= is_new
        self._came = others_came
        if self._epoch == epoch and not self._begins:
            self._again = self._beginning
        self._begins = False
        forget_validation_data(self._model)

    @property
    def shares_shuffles(self) -> bool:
        """Whether the validation data and the training data have a shuffle in common."""
        return self._common

    @property
    def next(self) -> NextValidation:
        """The data that the next validation reads."""
        if self._again is not None:
            return NextValidation(self._again, again=True)
        return NextValidation(self._beginning, made=max(self._made - 1, 0))

    def begin_anew(self) -> None:
        """Makes the next validation read the data from the beginning, as in a new process."""
        self._again, self._before = self._first, None
        self._beginning, self._epoch = None, -1

    def resume(self, following: NextValidation) -> None:
        """Makes the next validation read the data that another call of `fit` would read next."""
        if following.position is not None:
            self._again = following.position if following.again else None
            self._before = None if following.again else following

    def _take_over(self, epochs: Any, again: bytes | None) -> bytes | None:
        """Sends the starting position to the workers that lack it, and returns it."""
        group = extended_of(made_under(epochs)).group
        lacking = group.exchange("validation data", "lacks" if self._lacks else "")
        if "" not in lacking:
            return again
        source = lacking.index("")
        mine = (self._beginning or b"") if group.topology.rank == source else b""
        contents = self._broadcast(mine, source)
        if self._lacks and contents:
            again = self._beginning = contents
        return again


def _following(before: NextValidation, epochs: Any, iterator: Any) -> bytes | None:
    """Returns the start of the next iterator, given the start of an earlier iterator."""
    assert before.position is not None
    set_position(iterator, before.position)
    for _ in range(before.made):
        new_iterator(epochs)
    return position_of(new_iterator(epochs))
