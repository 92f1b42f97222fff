"""A callback that logs how many bytes cross the network."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.collective.functions import statistics
from tfdist.collective.native_communicator import NativeCommunicator
from tfdist.strategies.extended import ReplicatedExtended


class TrafficLogger(keras.callbacks.Callback):  # type: ignore[misc]
    """Adds to each epoch's logs what this worker has sent to and received from other hosts.

    The bytes are counted by the native core where it writes and reads, so compression shows in
    them. They are `sent_bytes` and `received_bytes` in `History`, TensorBoard and the like. What
    stays on one host counts as nothing, and so does what TensorFlow's collectives send.

    Example:
        ```python
        history = model.fit(dataset, callbacks=[tfdist.callbacks.TrafficLogger()]).history
        print(history["sent_bytes"])
        ```
    """

    def __init__(self) -> None:
        super().__init__()
        self._before = (0, 0)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._before = self._count()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            names = ("sent_bytes", "received_bytes")
            for name, before, now in zip(names, self._before, self._count(), strict=True):
                logs[name] = now - before

    def _count(self) -> tuple[int, int]:
        strategy = self.model.distribute_strategy
        extended = None if strategy is None else strategy.extended
        if not isinstance(extended, ReplicatedExtended):
            return 0, 0
        # Stages are always connected by native ones, also where there is one pipeline.
        if not extended.in_stages and not isinstance(extended.workers, NativeCommunicator):
            return 0, 0
        traffic = statistics()
        return traffic.sent_bytes, traffic.received_bytes
