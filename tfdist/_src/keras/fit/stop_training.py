"""Stops training on all workers if one of them requests it."""

from __future__ import annotations

from typing import Any

import keras


class StopTogether(keras.callbacks.Callback):  # type: ignore[misc]
    """Stops all workers after an epoch in which a callback of one has set `stop_training`.

    It runs after the user's callbacks. A worker that stops alone within an epoch gets an error when
    the others are in their next step (`trainer/fit/epochs.py`): checking there would slow down
    every step.
    """

    communicates_in = ("on_epoch_end",)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        group = self.model.distribute_strategy.extended.group
        stops = group.exchange("whether to stop training", str(bool(self.model.stop_training)))
        self.model.stop_training = str(True) in stops
