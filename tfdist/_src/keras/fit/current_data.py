"""The data of the `fit` that a thread is in."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from tfdist._src.keras.fit.data_position import TrainingData


class _Here(threading.local):
    data: TrainingData | None = None


_here = _Here()


@contextlib.contextmanager
def training_data() -> Iterator[TrainingData]:
    """Within this context, the data that this thread's `fit` trains on is `current_data()`."""
    outer, _here.data = _here.data, TrainingData()
    try:
        yield _here.data
    finally:
        _here.data = outer


def current_data() -> TrainingData | None:
    """The data of the `fit` that this thread is in, if anybody asks for its position."""
    return _here.data


def batches_done() -> int:
    """Of the batches of the step that Keras's loop is about to run, how many have been trained."""
    data = current_data()
    if data is None or data.live is None:
        return 0
    done, data.live.batches_done = data.live.batches_done, 0
    return done
