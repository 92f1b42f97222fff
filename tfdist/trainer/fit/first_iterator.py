"""What the first iterator over a dataset was, to shuffle once more as from the beginning."""

from __future__ import annotations

from typing import Any

from tfdist.internals.datasets import shuffles
from tfdist.internals.iterators import changes_between_epochs, position_of
from tfdist.internals.keras import is_of_one_generator
from tfdist.trainer.fit.position import move_to


class FirstIterator:
    """Has a dataset begin again, whose iterators each shuffle in another way than the one before.

    The dataset counts them for as long as this process has it. An iterator that is moved to the
    position of the first one moves this count, too.
    """

    def __init__(self) -> None:
        self._is_made = self._is_known = False
        self._position: bytes | None = None

    def made(self, iterator: Any) -> None:
        """Takes note of a new iterator; the first one after `comes_again` becomes the first."""
        if self._is_made:
            return
        self._is_made = True
        if not self._is_known:
            self._position, self._is_known = position_of(iterator), True
        elif self._position is not None:
            move_to(iterator, self._position)

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
