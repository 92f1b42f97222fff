"""A callback that changes what is compressed during training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from tfdist.compression.compressor import Compressor
from tfdist.compression.policy import Policy
from tfdist.compression.registry import read
from tfdist.strategies.communication import cannot_compress
from tfdist.strategies.extended import ReplicatedExtended


class CompressionSchedule(keras.callbacks.Callback):  # type: ignore[misc]
    """Compresses gradients in another way from certain epochs on.

    What a codec has lost so far goes on to the next one that feeds errors back. Each change makes
    Keras trace the training step again. When training ends, the strategy's own compression is back.
    In one process it does nothing.

    Args:
        schedule: from an epoch, counted from 0, to what is used from then on: all that a strategy
            takes as `compression`. Before the first of them, what the strategy was made with.

    Raises:
        ValueError: an epoch is no integer from 0 on, or its value is nothing of the kind.
        UnsupportedError: in training, these workers cannot compress.
        ProgramMismatchError: in training, the workers have different schedules.

    Example:
        ```python
        schedule = {0: None, 1: "int8", 5: tfdist.compression.TopK(ratio=0.01)}
        model.fit(dataset, callbacks=[tfdist.callbacks.CompressionSchedule(schedule)])
        ```
    """

    def __init__(self, schedule: Mapping[int, Any]) -> None:
        super().__init__()
        for epoch in schedule:
            if not isinstance(epoch, int) or epoch < 0:
                raise ValueError(
                    f"An epoch of a schedule is an integer from 0 on. Received: {epoch!r}. Write "
                    'it as in {0: None, 1: "int8"}.'
                )
        self._policies = {epoch: read(schedule[epoch]) for epoch in sorted(schedule)}

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        compressor = self._compressor()
        if compressor is not None:
            begun = [policy for first, policy in self._policies.items() if first <= epoch]
            self._change(compressor, begun[-1] if begun else compressor.given)

    def on_train_end(self, logs: Any = None) -> None:
        compressor = self._compressor()
        if compressor is not None:
            self._change(compressor, compressor.given)

    def _change(self, compressor: Compressor, policy: Policy | None) -> None:
        if policy != compressor.policy:
            compressor.change(policy)
            self.model.make_train_function(force=True)

    def _compressor(self) -> Compressor | None:
        strategy = self.model.distribute_strategy
        extended = None if strategy is None else strategy.extended
        if not isinstance(extended, ReplicatedExtended) or extended.worker_count == 1:
            return None
        if extended.compressor is None and any(self._policies.values()):
            raise cannot_compress("the schedule")
        return extended.compressor
