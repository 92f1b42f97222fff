"""A callback that changes the gradient compression during training."""

from collections.abc import Mapping
from typing import Any

from tfdist._src.compression.compressor import Compressor
from tfdist._src.compression.policy import Policy, read
from tfdist._src.keras.fit.callback import Callback
from tfdist._src.strategy.extended import extended_if_ours
from tfdist._src.strategy.multi_worker import cannot_compress


class CompressionSchedule(Callback):
    """Changes the gradient compression at given epochs.

    If the next codec uses error feedback, it takes over the errors that the previous codec has
    accumulated. Each change makes Keras retrace the training step. When training ends, the
    strategy's compression is restored. In a single process, the callback has no effect.

    Args:
        schedule: maps an epoch, counted from 0, to the compression that is used from this epoch on.
            The compression can be any value that a strategy accepts as `compression`. Before the
            first of these epochs, the strategy's compression is used.

    Raises:
        ValueError: an epoch is not an integer >= 0, or its value is not a valid `compression`.
        UnsupportedError: in training, if the workers use TensorFlow's collectives, which cannot
            compress.
        ProgramMismatchError: in training, if the workers have different schedules.

    Example:
        ```python
        schedule = {0: None, 1: "int8", 5: tfdist.compression.TopK(ratio=0.01)}
        model.fit(dataset, callbacks=[tfdist.callbacks.CompressionSchedule(schedule)])
        ```
    """

    same_on_all_workers = True
    communicates_in = ("on_epoch_begin",)

    def __init__(self, schedule: Mapping[int, Any]) -> None:
        super().__init__()
        for epoch in schedule:
            if not isinstance(epoch, int) or epoch < 0:
                raise ValueError(
                    f"The epochs of a schedule must be integers >= 0. Received: {epoch!r}. Write "
                    'the schedule as in {0: None, 1: "int8"}.'
                )
        self._policies = {epoch: read(schedule[epoch]) for epoch in sorted(schedule)}

    def __repr__(self) -> str:
        return f"CompressionSchedule({self._policies})"

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
        else:
            compressor.confirm()  # A worker that has joined may call `change`.

    def _compressor(self) -> Compressor | None:
        extended = extended_if_ours(self.model.distribute_strategy)
        if extended is None or extended.worker_count == 1:
            return None
        if extended.compressor is None and any(self._policies.values()):
            raise cannot_compress("the schedule")
        return extended.compressor
