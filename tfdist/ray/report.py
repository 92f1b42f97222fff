"""Reports metrics and checkpoints of `fit` to Ray."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import ray.train

from tfdist.cluster.this_worker import is_chief
from tfdist.trainer.fit.added_callbacks import RunsLast

MODEL = "model.keras"


class ReportCallback(RunsLast, keras.callbacks.Callback):  # type: ignore[misc]
    """Reports the logs of each epoch, with a checkpoint that holds the model.

    All workers report, as Ray wants it; the checkpoint is the chief's: a folder with `model.keras`,
    which `keras.models.load_model` reads. It has the weights of that epoch, also where
    `EarlyStopping` restores better ones afterwards. To resume a training exactly, add
    `tfdist.callbacks.BackupAndRestore`.

    Args:
        checkpoint_every: how many epochs there are from one checkpoint to the next; the last epoch
            has one, too, unless this is 0. Ray's `Result.metrics` are those of the last checkpoint.

    Raises:
        ValueError: `checkpoint_every` is negative.

    Example:
        ```python
        model.fit(dataset, callbacks=[tfdist.ray.ReportCallback()])
        # On the driver:
        with result.checkpoint.as_directory() as folder:
            model = keras.models.load_model(f"{folder}/model.keras")
        ```
    """

    same_on_all_workers = True

    def __init__(self, checkpoint_every: int = 1) -> None:
        super().__init__()
        if checkpoint_every < 0:
            raise ValueError(
                "`checkpoint_every` must be a number of epochs, or 0. Received: "
                f"{checkpoint_every}. Pass 1."
            )
        self._every = checkpoint_every

    def __repr__(self) -> str:
        return f"ReportCallback(checkpoint_every={self._every})"

    def runs_after(self, others: Sequence[Any]) -> None:
        """Needs nothing of them, but that they have decided whether this is the last epoch."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        metrics = {name: np.asarray(value).tolist() for name, value in (logs or {}).items()}
        last = epoch + 1 == self.params["epochs"] or self.model.stop_training
        if not self._every or ((epoch + 1) % self._every and not last):
            ray.train.report(metrics)
            return
        with tempfile.TemporaryDirectory() as folder:
            self.model.save(Path(folder) / MODEL)  # by all workers: each may hold a part
            checkpoint = ray.train.Checkpoint.from_directory(folder) if is_chief() else None
            ray.train.report(metrics, checkpoint=checkpoint)
