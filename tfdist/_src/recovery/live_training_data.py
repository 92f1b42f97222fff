"""The data of a call of `fit` that goes on with other workers."""

from __future__ import annotations

from typing import Any

from tfdist._src.keras.fit.data_position import TrainingData
from tfdist._src.keras.fit.live_data import LiveData
from tfdist._src.keras.fit.validation_data import ValidationData
from tfdist._src.snapshots.workers import broadcast_bytes, workers_of


def begin_live(model: Any, data: TrainingData, *, keeps_rows: bool) -> LiveData:
    """Has data go on with the same iterators when `fit` is entered again.

    Args:
        model: in training.
        data: the training data.
        keeps_rows: whether a worker's part of a batch keeps its rows when the group changes.
    """
    extended = model.distribute_strategy.extended
    keep_validation(model, data)
    came_later = data.live is not None and data.live.came_later
    data.live = LiveData(
        keeps_rows=keeps_rows,
        workers=lambda: extended.group.topology.size,
    )
    data.live.came_later = came_later
    return data.live


def keep_validation(model: Any, data: TrainingData) -> ValidationData:
    """Keeps account of the validation data of a call of `fit`.

    Args:
        model: in training.
        data: the training data.
    """
    extended = model.distribute_strategy.extended

    def broadcast(contents: bytes, source: int) -> bytes:
        return broadcast_bytes(contents, source, workers_of(extended))

    if data.validation is None:
        data.validation = ValidationData(model, broadcast)
    return data.validation
