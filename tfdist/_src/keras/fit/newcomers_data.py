"""The data of workers that come in the middle of an epoch is compared with that of the others.

What a dataset draws in Python may be drawn in another way there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdist._src.data.first_batch import FirstBatch
from tfdist._src.keras.fit.data_position import TrainingData
from tfdist._src.keras.fit.live_data import LiveData, Step


def advance_compared(
    batches: FirstBatch | None, data: TrainingData, advance: Callable[[], Step]
) -> Step:
    """The next step, whose batch is compared first if some workers have come since the last one.

    Args:
        batches: compares those of the training data; None if this process is alone.
        data: the training data.
        advance: returns the step, or raises StopIteration.

    Raises:
        ProgramMismatchError: this worker has come later, and reads different data.
    """
    live = data.live
    if live is None or not live.compares or batches is None:
        return advance()
    try:
        step = advance()
    except StopIteration:
        _compare(batches, live, None)
        raise
    _compare(batches, live, step[-1])
    return step


def _compare(batches: FirstBatch, live: LiveData, iterator: Any) -> None:
    batches.compare_next(iterator, live.replay, is_new=live.came_later)
    if iterator is not None:
        iterator.whole = batches.whole
    live.compares = False
