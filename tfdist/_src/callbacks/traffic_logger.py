"""A callback that logs network traffic."""

from typing import Any

from tfdist._src.comm.functions import statistics
from tfdist._src.comm.native_communicator import CoreCommunicator
from tfdist._src.keras.fit.callback import Callback
from tfdist._src.strategy.extended import extended_if_ours


class TrafficLogger(Callback):
    """Adds the bytes sent to and received from other hosts to each epoch's logs.

    The native core counts the bytes that it sends and receives after compression. The counts appear
    as `sent_bytes` and `received_bytes` in `History`, TensorBoard and other callbacks. They do not
    include traffic within a host, traffic of TensorFlow's collectives, and traffic of GPUs over
    NCCL.

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
        extended = extended_if_ours(self.model.distribute_strategy)
        if extended is None:
            return 0, 0
        # Pipeline stages always use native communicators, even with a single pipeline.
        if not extended.in_stages and not isinstance(extended.workers, CoreCommunicator):
            return 0, 0
        traffic = statistics()
        return traffic.sent_bytes, traffic.received_bytes
