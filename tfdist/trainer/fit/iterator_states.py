"""The states of iterators over the training data, where they can be saved."""

from __future__ import annotations

import functools
from typing import Any

from tfdist.internals.iterators import position_of
from tfdist.internals.keras import is_of_arrays
from tfdist.strategies.batch_contents import draws_numbers

_LARGEST_BYTES = 256 << 20


class IteratorStates:
    """Saves iterators, unless their states are incomplete or too large.

    Args:
        adapter: of Keras, of the data.
    """

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self._is_small = True

    def of(self, iterator: Any) -> bytes | None:
        """The state of an iterator; None if it cannot be saved."""
        state = position_of(iterator) if self._is_small and self._is_complete else None
        if state is not None and len(state) > _LARGEST_BYTES:
            state, self._is_small = None, False
        return state

    @functools.cached_property
    def _is_complete(self) -> bool:
        """Whether an iterator has all state: no random numbers are drawn while it is read."""
        # Keras's shuffle of arrays is drawn at the beginning of an iterator, which keeps it.
        return is_of_arrays(self._adapter) or not draws_numbers(self._adapter.get_tf_dataset())
