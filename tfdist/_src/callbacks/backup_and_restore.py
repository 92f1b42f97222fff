"""A callback that saves the whole state of a training run, and resumes from it exactly."""

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from typing import Any, Literal

from tfdist._src.callbacks.step_count import is_positive
from tfdist._src.internals.iterators import set_initial_epoch
from tfdist._src.keras.fit.callback import GroupInfo
from tfdist._src.keras.fit.hooks import RunsLast
from tfdist._src.keras.fit.position import Position
from tfdist._src.keras.fit.step_exchange import Request, step_exchange
from tfdist._src.keras.fit.training_data import current_data
from tfdist._src.log import logger
from tfdist._src.monitoring.training import record
from tfdist._src.options import PREEMPTED
from tfdist._src.recovery.fit_calls import keep_validation
from tfdist._src.recovery.next_group import ReadsSnapshots
from tfdist._src.recovery.preemption import preemption
from tfdist._src.snapshots.restore import SnapshotFolder
from tfdist._src.snapshots.snapshot_series import SnapshotSeries
from tfdist._src.snapshots.training_snapshot import Resumption, TrainingPosition, take_snapshot
from tfdist._src.snapshots.worker_state import HeldVariable, held_variables, require_variables
from tfdist._src.strategy.commit_point import Progress
from tfdist._src.strategy.extended import extended_if_ours, extended_of
from tfdist.errors import UnsupportedError


class BackupAndRestore(ReadsSnapshots, RunsLast):
    """Saves the state of training, and resumes from it when the script is restarted.

    If training is killed at any moment and restarted, it ends with the same weights, bit for bit,
    as without the interruption. A snapshot contains everything that determines the rest of the
    training: the weights, the optimizer's state, the metrics of the current epoch, random states,
    the state of codecs and other callbacks, and the position in the data. Snapshots are written in
    the background. Training waits only until the values of a snapshot have been captured.

    Every worker must pass this callback. Each worker writes the state that no other worker holds.
    If several workers share a directory, one of them writes the state that is common to all
    workers. No shared disk is needed: when training begins, the workers assemble the newest
    snapshot from the files in their directories. The number of workers may be different when
    training resumes. If some state cannot be restored for this reason, a message says so.

    Schedulers send SIGTERM before they reclaim a machine. All workers then save the state after the
    current step and exit with code 75. With `Elastic`, in a job of `tfdist run --elastic`, only the
    workers that received the signal exit, provided that the other workers can continue.

    The state of other callbacks of tfdist and Keras is restored as well. Your own callback is
    restored if it has the methods `state_dict` and `load_state_dict` of
    `tfdist.callbacks.Callback`.

    Args:
        directory: the directory of the snapshots, on a shared disk or on each host. Use a separate
            directory for each training run.
        save_every: the number of batches between snapshots, or `"epoch"`.
        keep: the number of complete snapshots to keep. A snapshot is complete when all workers have
            written it.
        asynchronous: whether training continues while a snapshot is written. Only the values that
            the next step overwrites are copied in memory.
        delete_checkpoint: whether to delete the snapshots when training has ended, so that the next
            call of `fit` starts from the beginning. If False, the next call of `fit` finds that
            training has finished, and does nothing. Pass False if the script may fail after `fit`,
            or if it calls `fit` several times. In the latter case, use a separate directory for
            each call.

    Raises:
        ValueError: an argument is invalid.
        UnsupportedError: in `fit`, if the model was created outside of a strategy's scope, or has
            no variables yet.
        ProgramMismatchError: in `fit`, if not all workers have this callback.
        SnapshotError: in `fit`, if the snapshots belong to another model, or cannot be read.

    Example:
        ```python
        model.fit(dataset, epochs=10,
                  callbacks=[tfdist.callbacks.BackupAndRestore("/shared/run7", save_every=500)])
        ```
    """

    same_on_all_workers = True

    def __init__(
        self,
        directory: str | os.PathLike[str],
        save_every: int | Literal["epoch"] = "epoch",
        keep: int = 2,
        asynchronous: bool = True,
        delete_checkpoint: bool = True,
    ) -> None:
        super().__init__()
        folder = SnapshotFolder.at(directory)
        if save_every != "epoch" and not is_positive(save_every):
            raise ValueError(
                "`save_every` must be a positive number of batches or 'epoch'. Received: "
                f"{save_every!r}. Pass an integer such as 500."
            )
        if not is_positive(keep):
            raise ValueError(f"`keep` must be a positive integer. Received: {keep!r}. Pass 2.")
        self._series = SnapshotSeries(folder, keep=keep, asynchronous=asynchronous)
        self._save_every, self._keep = save_every, keep
        self._delete = delete_checkpoint
        self._others: Sequence[Any] = ()
        self._held: list[HeldVariable] = []
        self._epoch = self._steps = self._steps_before = self._last_saved = 0
        self._not_counted: int | None = None  # trained steps that `committed_steps` lacks
        self._looking = False  # whether a snapshot is being read, with the initial state intact
        self._asked = False  # whether `save_soon` has been called

    def __repr__(self) -> str:
        return f"BackupAndRestore(save_every={self._save_every!r}, keep={self._keep})"

    def save_soon(self) -> None:
        """Requests a snapshot after the current step or the next step.

        All workers must call this method in the same step.
        """
        self._asked = True

    def _runs_after(self, others: Sequence[Any]) -> None:
        self._others = others

    def _during_fit(self) -> contextlib.AbstractContextManager[Any]:
        return preemption.heeding()

    def on_train_begin(self, logs: Any = None) -> None:
        strategy = self.model.distribute_strategy
        data = current_data()
        if data is None or extended_if_ours(strategy) is None:
            raise UnsupportedError(
                "BackupAndRestore needs a model created in the scope of a tfdist strategy. Create "
                "it inside `with strategy.scope():`; this also applies to a single process."
            )
        require_variables(self.model, "BackupAndRestore")
        self._data, self._validation = data, keep_validation(self.model, data)
        self._series.begin(extended_of(strategy))
        self._epoch = self._steps = self._steps_before = self._last_saved = 0
        progress, self._held, self._not_counted = extended_of(strategy).progress, [], None
        # A joining worker does not read a snapshot. It receives the state from the other workers.
        if extended_of(strategy).group.joiner is None:
            self._restore(progress)
            self._not_counted = self._steps - progress.committed_steps

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        set_initial_epoch(self.model, None)  # `initial_epoch` is for this call of `fit`.
        self._epoch, self._steps_before = epoch, self._steps
        self._data.epoch_begins()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps = self._steps_before + batch + 1
        if self.model.stop_training:
            return  # The epoch ends here, also after a restart.
        if step_exchange.is_granted(Request.SAVE_AND_EXIT):
            self._leave(TrainingPosition(self._steps, self._epoch, batch + 1))
        elif self._is_due() and not self._ends_epoch(batch):
            self._save(TrainingPosition(self._steps, self._epoch, batch + 1))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        steps = self.params.get("steps")
        if steps:  # The last call may have run fewer steps.
            self._steps = self._steps_before + steps
        ends = epoch + 1 >= self.params["epochs"] or self.model.stop_training
        # If snapshots are kept, the last one contains the final state, so that a repeated call of
        # `fit` does nothing.
        if self._save_every == "epoch" or self._is_due() or (ends and not self._delete):
            self._save(TrainingPosition(self._steps, epoch + 1, 0, bool(self.model.stop_training)))

    def on_train_end(self, logs: Any = None) -> None:
        set_initial_epoch(self.model, None)
        # All writes must have ended on this worker before another worker deletes the snapshots.
        self._series.wait()
        mine = "SIGTERM" if preemption.asked else ""
        # The snapshots are deleted only when all workers have trained to the end, because a worker
        # that fails now must be able to resume.
        if any(self._series.workers.exchange("training has ended", mine)):
            self._leave(TrainingPosition(self._steps, self.params["epochs"], 0))
        self._series.end(delete=self._delete)

    def on_group_change(self, old: GroupInfo, new: GroupInfo) -> None:
        self._series.change_workers(extended_of(self.model.distribute_strategy))
        self._held = []

    def _on_state_lost(self, committed_steps: int) -> tuple[int, int] | None:
        found = self._series.load_newest(self.model)
        if found is None:
            intact = self._series.workers.exchange("intact", "yes" if self._looking else "")
            return (0, 0) if all(intact) else None
        step = found.step
        trained = step if self._not_counted is None else self._not_counted + committed_steps
        most = max(map(int, self._series.workers.exchange("steps trained", str(trained))))
        return step, max(most - step, 0)

    def on_group_wait(self, epoch: int, batches: int) -> bool:
        if batches:
            self._steps = self._steps_before + batches
        # The serialized iterators are left out, because the next group reads the data again in any
        # case.
        position = dataclasses.replace(self._data.read_trained(batches), state=None, fresh=None)
        if not batches and self._data.reentry is not None and not self._data.reentry.has_ended:
            # The iterator of the epoch has been created, but no batch of it has been trained, so
            # the iterator does not count.
            position = dataclasses.replace(position, iterators=position.iterators - 1)
        stopped = not batches and bool(self.model.stop_training)
        self._save(TrainingPosition(self._steps, epoch, batches, stopped), position)
        return self._finish_last()

    def state_dict(self) -> dict[str, Any]:
        """Returns the progress of training, which a joining worker needs."""
        return {
            "steps": self._steps_before,
            "last_saved": self._last_saved,
            "not_counted": self._not_counted,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the progress of training before the current epoch."""
        self._steps, self._last_saved = state["steps"], state["last_saved"]
        self._not_counted = state["not_counted"]

    def _restore(self, progress: Progress) -> None:
        elastic, torn = self._data.reentry is not None, progress.torn
        progress.torn |= elastic  # until the first batch begins on all workers
        self._looking = not torn
        restored = self._series.loaded_or_newest(self.model)
        self._looking = False
        if restored is None:
            progress.torn = torn
            return
        workers = self._series.workers
        resume = Resumption(restored, self.model, self._others, workers, elastic=elastic)
        training_position = resume.training_position
        self._steps = self._last_saved = training_position.steps
        record.resumed_at(training_position.steps)
        self._series.resume_from(restored.snapshot)
        set_initial_epoch(self.model, training_position.epoch)
        resume.load()
        self._validation.resume(resume.validation)
        if training_position.batch:
            # The state is loaded again after the epoch has begun, because callbacks change it in
            # `on_epoch_begin`.
            self._steps -= training_position.batch
            self._data.resume_within_epoch(
                resume.position,
                training_position.epoch,
                training_position.batch,
                lambda: resume.load(self._data.skipped),
            )
        else:
            self._data.resume_between_epochs(resume.position, training_position.epoch)
            resume.load()
            if training_position.stopped:
                set_initial_epoch(self.model, self.params["epochs"])
        resume.announce()

    def _is_due(self) -> bool:
        if self._asked or self._save_every == "epoch":
            return self._asked
        return self._steps // self._save_every > self._last_saved // self._save_every

    def _ends_epoch(self, batch: int) -> bool:
        steps = self.params.get("steps")
        return bool(steps) and batch + 1 >= steps

    def _save(self, training_position: TrainingPosition, position: Position | None = None) -> None:
        self._series.finish_last()
        if not self._held:  # This is slow for shards and stages, so it is done once.
            self._held = held_variables(self.model)
        write = take_snapshot(
            self.model,
            self._held,
            self._others,
            position or self._data.read(epoch_ends=training_position.batch == 0),
            self._validation.next,
            training_position,
            self._series,
        )
        self._last_saved, self._asked = training_position.steps, False
        self._series.add(training_position.steps, write)

    def _leave(self, training_position: TrainingPosition) -> None:
        """Saves the state and exits, because a worker has received SIGTERM.

        If the other workers can continue, `preemption.release` raises an exception, and nothing is
        saved.
        """
        preemption.release()
        self._save(training_position)
        code = PREEMPTED if self._finish_last("SIGTERM: ") else 1
        if self._series.workers.rank == 0:
            what = ", which requests a restart" if code == PREEMPTED else ""
            logger.info(f"exiting with code {code}{what}.")
        raise SystemExit(code)

    def _finish_last(self, why: str = "") -> bool:
        """Waits until all workers have written the last snapshot, and reports the outcome."""
        is_complete = self._series.finish_last()
        if self._series.workers.rank == 0:
            state = f"is saved in {self._series.folder.path}" if is_complete else "is lost"
            logger.info(f"{why}the state after {self._steps} steps {state}.")
        return is_complete
