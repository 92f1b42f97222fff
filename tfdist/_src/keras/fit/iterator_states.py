"""The states of iterators over the training data, where they can be saved."""

from __future__ import annotations

import functools
from typing import Any

from tfdist._src.data.batch_contents import draws_numbers
from tfdist._src.internals.datasets import caches, shuffle_buffers
from tfdist._src.internals.iterators import position_of
from tfdist._src.internals.keras import describe_arrays, is_of_arrays

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
