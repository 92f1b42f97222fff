"""The validation data of a call of `fit`.

Each validation reads its data with a new iterator, which may shuffle in another way than the one
before. A validation that is run again, since a worker was lost in it, reads what it read before;
workers that are new read the same as the others; and a training that is resumed goes on with what
it would have read next.
"""

from __future__ import annotations

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


class NextValidation(NamedTuple):
    """What the next validation reads.

    Attributes:
        position: where an iterator began; None if there has been none, or it has no position.
        again: whether the next one begins there, rather than behind it.
        made: how many iterators have been made since that one.
    """

    position: bytes | None = None
    again: bool = False
    made: int = 0


class TrainingIterators(Protocol):
    """Iterators over the training data.

    Attributes:
        iterators: how many have been made, each of which shuffles in its own way.
    """

    iterators: int

    @property
    def adapter(self) -> Any:
        """Keras's, of the data."""


class ValidationData:
    """Has validation in `fit` read the same rows, whatever happens to the workers.

    Args:
        model: in training.
        broadcast: passes bytes from a rank to all; called by all workers.
    """

    def __init__(self, model: Any, broadcast: Callable[[bytes, int], bytes]) -> None:
        self._model, self._broadcast = model, broadcast
        self._begins = self._came = self._lacks = False
        self._entered = self._epoch = -1  # the epoch; and of which `_beginning` is
        self._shuffles: bool | None = None
        self._common = False  # whether one of its shuffles is of the training data, too
        self._first: bytes | None = None  # where the first iterator began
        self._beginning: bytes | None = None  # that of the last validation
        self._again: bytes | None = None  # that of the next one
        self._before: NextValidation | None = None  # behind which that begins
        self._made = 0  # iterators in the last validation
        self._made_before = 0  # iterators over the training data, before it

    def belongs_to(self, epochs: Any) -> bool:
        """Whether a loop over one of Keras's epoch iterators is validation in `fit`."""
        return validation_epochs(self._model) is epochs

    def begins(self, epochs: Any, training: TrainingIterators, epoch: int) -> None:
        """The validation of an epoch begins, with a new iterator.

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
        """Counts an iterator over the data. Keras makes some that it never reads."""
        self._made += 1
        training.iterators += self._common

    def step(self, epochs: Any, iterator: Any) -> None:
        """Moves the iterator to where it begins, before the first step; called before each.

        Args:
            epochs: Keras's epoch iterator.
            iterator: of the step.
        """
        if not self._begins:
            return
        self._begins, self._epoch = False, self._entered
        again, self._again = self._again, None
        before, self._before = self._before, None
        if self._shuffles:
            if before is not None and not self._common:  # That moves with the training data.
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
        """Has Keras distribute the data anew; called by all workers.

        Args:
            epoch: the epoch that all enter; its validation is run again if it has begun.
            is_new: whether this worker has just come.
            others_came: whether any has.
        """
        self._lacks |= is_new
        self._came = others_came
        if self._epoch == epoch and not self._begins:
            self._again = self._beginning
        self._begins = False
        forget_validation_data(self._model)

    @property
    def shares_shuffles(self) -> bool:
        """Whether the data has a shuffle in common with the training data."""
        return self._common

    @property
    def next(self) -> NextValidation:
        """What the next validation reads."""
        if self._again is not None:
            return NextValidation(self._again, again=True)
        return NextValidation(self._beginning, made=max(self._made - 1, 0))

    def begin_anew(self) -> None:
        """Reads as in a process that has just started."""
        self._again, self._before = self._first, None
        self._beginning, self._epoch = None, -1

    def resume(self, following: NextValidation) -> None:
        """Goes on with what another call of `fit` would have read next."""
        if following.position is not None:
            self._again = following.position if following.again else None
            self._before = None if following.again else following

    def _take_over(self, epochs: Any, again: bytes | None) -> bytes | None:
        """Tells those that have come since the last validation where the others begin."""
        group = made_under(epochs).extended.group
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
    """Where the iterator begins that is made next, on from where others were made before."""
    assert before.position is not None
    set_position(iterator, before.position)
    for _ in range(before.made):
        new_iterator(epochs)
    return position_of(new_iterator(epochs))
