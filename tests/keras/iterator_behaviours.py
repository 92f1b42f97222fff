"""What ranks do in the tests of iterators."""

from __future__ import annotations

from unittest import mock

from tests.strategy.behaviours.common import compile_mlp, fit, rows
from tfdist._src.keras.fit import epoch_iterator


def ended_in_background(strategy):
    """How many iterators of three epochs."""
    x, y = rows(20)
    ended = []
    with mock.patch.object(epoch_iterator, "end_in_background", ended.append):
        fit(compile_mlp(strategy), x, y, batch_size=10, epochs=3)
    return len({id(iterator) for iterator in ended})
