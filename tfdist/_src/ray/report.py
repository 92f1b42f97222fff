"""Reports metrics and checkpoints of `fit` to Ray."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import ray.train

from tfdist._src.callbacks.backup_and_restore import BackupAndRestore
from tfdist._src.callbacks.step_count import is_positive
from tfdist._src.cluster.this_worker import is_chief
from tfdist._src.keras.fit.hooks import RunsLast
from tfdist._src.log import logger

MODEL = "model.keras"


class ReportCallback(RunsLast):
    """Reports the logs of each epoch, with a checkpoint that holds the model.

    All workers report, as Ray requires. The chief also reports the checkpoint, a folder with a file
    `model.keras` that `keras.models.load_model` can read. The model has the weights of that epoch,
    even if `EarlyStopping` restores better weights afterward. To resume a training run exactly, add
    `tfdist.callbacks.BackupAndRestore`.

    If `backup` is given, this callback also reacts when Ray announces that it is about to remove a
    node. `backup` then saves the state, and training continues until Ray restarts it on other
    nodes.

    Args:
        checkpoint_every: the number of epochs between checkpoints. If it is 0, there are no
            checkpoints. Otherwise, the last epoch also has a checkpoint. Ray's `Result.metrics` are
            the metrics of the last checkpoint.
        backup: the callback that saves the state when Ray is about to remove a node.
        preemption_every: the number of steps between two checks for such an announcement. In each
            check, all workers wait for one another, which takes about 3 ms.

    Raises:
        ValueError: `checkpoint_every` is negative, or `preemption_every` is not positive.

    Example:
        ```python
        backup = tfdist.callbacks.BackupAndRestore("/shared/run7", save_every=500)
        model.fit(dataset, callbacks=[tfdist.ray.ReportCallback(backup=backup), backup])
        # On the driver:
        with result.checkpoint.as_directory() as folder:
            model = keras.models.load_model(f"{folder}/model.keras")
        ```
    """

    same_on_all_workers = True

    def __init__(
        self,
        checkpoint_every: int = 1,
        backup: BackupAndRestore | None = None,
        preemption_every: int = 50,
    ) -> None:
        super().__init__()
        if checkpoint_every < 0:
            raise ValueError(
                "`checkpoint_every` must be a number of epochs, or 0. Received: "
                f"{checkpoint_every}. Pass 1."
            )
        if not is_positive(preemption_every):
            raise ValueError(
                "`preemption_every` must be a positive number of steps. Received: "
                f"{preemption_every!r}. Pass 50."
            )
        self._every = checkpoint_every
        self._backup = backup
        self._ask_every = preemption_every
        self._steps = 0
        self._announced: set[str] = set()

    def __repr__(self) -> str:
        return f"ReportCallback(checkpoint_every={self._every})"

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._steps += 1
        if self._backup is None or self._steps % self._ask_every:
            return
        notice = ray.train.get_preemption_info()
        if notice is None or self._announced.issuperset(notice.preempted_node_ids):
            return
        self._announced.update(notice.preempted_node_ids)
        if is_chief():
            logger.info("Ray is about to remove a node: saving the state")
        self._backup.save_soon()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        metrics = {name: np.asarray(value).tolist() for name, value in (logs or {}).items()}
        last = epoch + 1 == self.params["epochs"] or self.model.stop_training
        if not self._every or ((epoch + 1) % self._every and not last):
            ray.train.report(metrics)
            return
        with tempfile.TemporaryDirectory() as folder:
            # All workers call `save`, because each of them may hold a part of the model.
            self.model.save(Path(folder) / MODEL)
            checkpoint = ray.train.Checkpoint.from_directory(folder) if is_chief() else None
            ray.train.report(metrics, checkpoint=checkpoint)
