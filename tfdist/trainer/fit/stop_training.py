"""Ends training on all workers where one of them asks for it."""

from __future__ import annotations

from typing import Any

import keras


class StopTogether(keras.callbacks.Callback):  # type: ignore[misc]
    """Lets all workers stop after an epoch where a callback of one has set `stop_training`.

    It comes after the user's callbacks. Who stops within an epoch, and alone, is told so when the
    others are in their next step (`trainer/fit/epochs.py`): asking there would cost each step.
    """

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        group = self.model.distribute_strategy.extended.group
        stops = group.exchange("whether to stop training", str(bool(self.model.stop_training)))
        self.model.stop_training = str(True) in stops
