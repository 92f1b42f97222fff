"""Updates the automatic choice of a codec to the links' speed during training."""

from __future__ import annotations

import time
from typing import Any

import keras

_SECONDS = 30.0


class FollowLinks(keras.callbacks.Callback):  # type: ignore[misc]
    """Probes the links at the start of an epoch, at most twice a minute; collective."""

    communicates_in = ("on_epoch_begin",)

    def __init__(self) -> None:
        super().__init__()
        self._last = time.monotonic()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        extended = self.model.distribute_strategy.extended
        if not extended.compressor.is_automatic:
            return
        group, choice = extended.group, extended.compressor.choice
        due = str(time.monotonic() - self._last >= _SECONDS)
        if group.exchange("whether to probe the links", due)[0] != str(True):
            return
        self._last = time.monotonic()
        changed = str(choice is not None and choice.reconsider())
        # Workers that hold different stages choose separately.
        if str(True) in group.exchange("whether another codec is chosen", changed):
            self.model.make_train_function(force=True)
