"""What the first iterator over a dataset was, to shuffle once more as from the beginning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdist._src.internals.datasets import shuffles
from tfdist._src.internals.iterators import (
    changes_between_epochs,
    new_iterator,
    position_of,
    remembers_epochs,
    shuffles_per_epoch,
)
from tfdist._src.internals.keras import is_of_one_generator
from tfdist._src.internals.tensorflow import take_next
from tfdist._src.keras.fit.position import Position, move_to


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
