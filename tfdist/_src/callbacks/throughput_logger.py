"""A callback that logs throughput and waiting times."""

from typing import Any

import keras

from tfdist._src.keras.fit.callback import Callback
from tfdist._src.monitoring.training import StepFigures, StepTimer


class ThroughputLogger(Callback):
    """Adds throughput, step times and waiting times to Keras's logs.

    The progress bar and the batch logs show the figures for the last `every` batches. The epoch
    logs contain the figures for the whole epoch. So the figures also appear in `History`,
    TensorBoard and other callbacks. Pass the `TensorBoard` callback after this callback; its
    `update_freq` then applies to the batch logs. Each worker logs its own figures, but rows and
    tokens are counted for the global batch.

    - `rows_per_second`, `tokens_per_second` (if the number of tokens per row is known)
    - `step_seconds`, `step_seconds_p95`: the median and the 95th percentile of the durations of
      steps, without the first step, which is traced
    - `input_wait`, `workers_wait`, `network_wait`: the fraction of the time, from 0 to 1, during
      which the step was blocked: waiting for the next batch, waiting for other workers to join a
      collective, and moving data, respectively. Activity that overlaps with computation is not
      counted
    - `bus_bytes_per_second`: the speed of collectives after all workers have joined, computed as in
      nccl-tests. For an all_reduce of n workers, the bytes before compression are multiplied by
      2(n-1)/n
    - `sent_bytes_per_step`: the bytes that were sent to other hosts, after compression, without the
      data that GPUs send by NCCL
    - `preprocessed`: the fraction of the rows, from 0 to 1, that this worker has preprocessed; only
      if the preprocessing of a dataset is divided among the workers

    All items after `step_seconds` need the native collectives, and are omitted otherwise.
    The callback itself calls no collective.

    Args:
        every: the number of batches between updates of the batch logs.
        tokens_per_row: the number of tokens per row. By default, this is the length of the model's
            first input, if each row of this input is a vector of integers.

    Raises:
        ValueError: `every` or `tokens_per_row` is not a positive integer.

    Example:
        ```python
        history = model.fit(dataset, callbacks=[tfdist.callbacks.ThroughputLogger()]).history
        print(history["rows_per_second"], history["workers_wait"])
        ```
    """

    def __init__(self, every: int = 10, tokens_per_row: int | None = None) -> None:
        super().__init__()
        for name, value in (("every", every), ("tokens_per_row", tokens_per_row)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(
                    f"`{name}` must be a positive integer. Received: {value!r}. Pass an integer "
                    "such as 100."
                )
        self._every = every
        self._tokens_per_row = tokens_per_row
        self._epoch, self._window = StepTimer(), StepTimer()
        self._shown: dict[str, float] = {}
        self._updated = 0  # the number of updates in this epoch

    def on_train_begin(self, logs: Any = None) -> None:
        self._epoch.begin_training()
        self._window.begin_training()
        self._shown = {}

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch.begin_epoch()
        self._window.begin_epoch()
        self._updated = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._epoch.begin_batch()
        self._window.begin_batch()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._epoch.end_batch(batch)
        self._window.end_batch(batch)
        if (batch + 1) // self._every > self._updated:
            self._updated = (batch + 1) // self._every
            self._shown = self._describe(self._window.figures())
            self._window.restart()
        if logs is not None:
            logs.update(self._shown)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs.update(self._describe(self._epoch.figures()))

    def _describe(self, figures: StepFigures | None) -> dict[str, float]:
        if figures is None or figures.seconds <= 0:
            return {}
        counted = figures.activity
        logs = {"step_seconds": figures.quantile(0.5), "step_seconds_p95": figures.quantile(0.95)}
        if figures.rows:
            logs["rows_per_second"] = figures.rows / figures.seconds
            if tokens := self._tokens_per_row or _length_of_rows(self.model):
                logs["tokens_per_second"] = tokens * logs["rows_per_second"]
        if counted is not None:
            logs["input_wait"] = figures.share(counted.input)
            logs["workers_wait"] = figures.share(counted.workers)
            logs["network_wait"] = figures.share(counted.network)
            if counted.bus_time > 0:
                logs["bus_bytes_per_second"] = counted.bus_bytes / counted.bus_time
            logs["sent_bytes_per_step"] = figures.sent_bytes / max(1, figures.steps)
        if figures.preprocessed is not None:
            logs["preprocessed"] = figures.preprocessed
        return logs


def _length_of_rows(model: Any) -> int | None:
    """Returns the length of the model's first input, if its rows are vectors of integers."""
    inputs = keras.tree.flatten(getattr(model, "inputs", None) or [])
    if not inputs or not keras.backend.is_int_dtype(inputs[0].dtype):
        return None
    shape = tuple(inputs[0].shape)
    return shape[1] if len(shape) == 2 else None
