"""The validation data of a call of `fit` that goes on with other workers.

Each validation reads its data with a new iterator, which may shuffle in another way than the one
before. A validation that is run again, since a worker was lost in it, reads what it read before;
and workers that are new read the same as the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdist.internals.datasets import shuffles
from tfdist.internals.iterators import (
    forget_validation_data,
    position_of,
    set_position,
    validation_epochs,
)
from tfdist.internals.keras import made_under


class ValidationData:
    """Has validation in `fit` read the same rows, whatever happens to the group of workers.

    Args:
        model: in training.
        broadcast: passes bytes from a rank to all; called by all workers.
    """

    def __init__(self, model: Any, broadcast: Callable[[bytes, int], bytes]) -> None:
        self._model, self._broadcast = model, broadcast
        self._begins = self._came = self._lacks = False
        self._entered = self._epoch = -1  # the epoch; and of which `_beginning` is
        self._shuffles: bool | None = None
        self._beginning: bytes | None = None  # where the iterator of the last validation began
        self._again: bytes | None = None  # where that of the next one begins

    def belongs_to(self, epochs: Any) -> bool:
        """Whether a loop over one of Keras's epoch iterators is validation in `fit`."""
        return validation_epochs(self._model) is epochs

    def begins(self, epoch: int) -> None:
        """The validation of an epoch begins, with a new iterator."""
        self._begins, self._entered = True, epoch

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
        self._beginning = again
        if self._shuffles is None:  # To look at data may copy it.
            self._shuffles = shuffles(epochs.data_adapter.get_tf_dataset())
        if self._shuffles:
            self._beginning = again or position_of(iterator)
            if self._came:
                again = self._take_over(epochs, again)
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
        self._came |= others_came
        if self._epoch == epoch and not self._begins:
            self._again = self._beginning
        self._begins = False
        forget_validation_data(self._model)

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
