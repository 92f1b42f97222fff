"""Tells the record of training when the epochs of `fit` begin, so that steps have a duration."""

from __future__ import annotations

from typing import Any

import keras

from tfdist._src.monitoring.training import record


class StepClock(keras.callbacks.Callback):  # type: ignore[misc]
    """Leaves out of the steps' durations what `fit` does between its epochs.

    It is called once per epoch: the step functions themselves report the steps, which costs less,
    and leaves Keras free to call other callbacks in the background.
    """

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        record.epoch_begins()

    def on_train_end(self, logs: Any = None) -> None:
        record.fit_ends()
