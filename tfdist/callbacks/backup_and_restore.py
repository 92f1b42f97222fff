"""A callback that saves the whole state of a training, and resumes from it exactly."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import keras

from tfdist.cluster.net.wait_messages import say
from tfdist.elastic.held_state import Held, held_by
from tfdist.elastic.preemption import requesting_on_sigterm
from tfdist.elastic.restore import names, read_newest
from tfdist.elastic.snapshot_folder import SnapshotFolder, SnapshotId, new_run
from tfdist.elastic.snapshot_writer import SnapshotWriter
from tfdist.elastic.training_snapshot import Place, Resumption, take
from tfdist.elastic.variables import require_variables
from tfdist.elastic.workers import workers_of, writes_for_others
from tfdist.errors import UnsupportedError
from tfdist.exit_codes import PREEMPTED
from tfdist.internals.iterators import set_initial_epoch
from tfdist.monitoring.training import record
from tfdist.strategies.extended import ReplicatedExtended
from tfdist.trainer.fit.added_callbacks import RunsLast
from tfdist.trainer.fit.data_position import current_data
from tfdist.trainer.fit.step_requests import Request, requests


class BackupAndRestore(RunsLast, keras.callbacks.Callback):  # type: ignore[misc]
    """Saves the state of the training, and resumes from it when the script is started again.

    A training that is killed at any moment and started again ends with the same weights, bit for
    bit, as one that was not. A snapshot has everything that makes the rest of the training: the
    weights, the optimizer's state, the metrics of the running epoch, random states, what codecs and
    other callbacks remember, and the position in the data. It is written in the background; the
    step waits only until the values are noted.

    Every worker passes this callback. Each writes what it alone holds; what all hold is written by
    one worker for each directory that they share. No shared disk is needed: at the start the
    workers put the newest snapshot together from what each finds in its directory. The number of
    workers may differ from before; a line says what could not be taken over then.

    On SIGTERM, by which schedulers announce that they take a machine away, all workers save after
    the running step and exit with code 75 (`tfdist.exit_codes.PREEMPTED`).

    Other callbacks of this project and of Keras are restored. A callback of your own is if it has
    methods `state_dict()`, which returns what JSON can represent, and `load_state_dict(state)`.

    Args:
        directory: where snapshots are kept; on a shared disk, or each host's own. One for each
            training.
        save_every: the number of batches between snapshots, or `"epoch"`.
        keep: the number of snapshots to keep that all workers have written.
        asynchronous: whether training goes on while a snapshot is written. The values are copied
            only where the next step changes them.
        delete_checkpoint: whether to delete the snapshots when the training has ended, so that the
            next call of `fit` starts from the beginning. If False, it finds the training done,
            which is what a script needs that may fail after `fit`, or calls it several times; give
            each call a directory then.

    Raises:
        ValueError: an argument is invalid.
        UnsupportedError: in `fit`, if the model was created outside of a strategy's scope, or has
            no variables yet.
        ProgramMismatchError: in `fit`, if not all workers have this callback.
        SnapshotError: in `fit`, if the snapshots are of another model, or cannot be read.

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
        path = os.fspath(directory)
        if not path or "://" in path:
            raise ValueError(
                f"`directory` must be a local path. Received: {path!r}. Mount remote storage, or "
                "use a local disk of each host."
            )
        if save_every != "epoch" and not _positive(save_every):
            raise ValueError(
                "`save_every` must be a positive number of batches or 'epoch'. Received: "
                f"{save_every!r}. Pass an integer such as 500."
            )
        if not _positive(keep):
            raise ValueError(f"`keep` must be a positive integer. Received: {keep!r}. Pass 2.")
        self._folder = SnapshotFolder(Path(path).absolute())
        self._save_every, self._keep = save_every, keep
        self._writer = SnapshotWriter(asynchronous=asynchronous)
        self._delete = delete_checkpoint
        self._others: Sequence[Any] = ()
        self._held: list[Held] = []
        self._last: SnapshotId | None = None
        self._complete: list[SnapshotId] = []
        self._epoch = self._steps = self._steps_before = self._last_saved = 0

    def __repr__(self) -> str:
        return f"BackupAndRestore(save_every={self._save_every!r}, keep={self._keep})"

    def runs_after(self, others: Sequence[Any]) -> None:
        self._others = others

    def during_fit(self) -> contextlib.AbstractContextManager[Any]:
        return requesting_on_sigterm()

    def on_train_begin(self, logs: Any = None) -> None:
        strategy = self.model.distribute_strategy
        data = current_data()
        if data is None or not isinstance(strategy.extended, ReplicatedExtended):
            raise UnsupportedError(
                "BackupAndRestore needs a model created in the scope of a tfdist strategy. Create "
                "it inside `with strategy.scope():`; with a single process, too."
            )
        require_variables(self.model, "BackupAndRestore")
        self._data = data
        self._workers = workers_of(strategy.extended)
        self._run = self._workers.exchange("run", new_run())[0]
        self._writes_shared = writes_for_others(self._folder.path, self._workers, strategy.extended)
        self._epoch = self._steps = self._steps_before = self._last_saved = 0
        self._held, self._last, self._complete = [], None, []
        if strategy.extended.group.joiner is None:  # Otherwise the others have the state.
            self._restore()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        set_initial_epoch(self.model, None)  # It is of this call of `fit` alone.
        self._epoch, self._steps_before = epoch, self._steps
        self._data.epoch_begins()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps = self._steps_before + batch + 1
        if self.model.stop_training:
            return  # The epoch ends here; a training that resumes stops in the same way.
        if requests.is_granted(Request.SAVE_AND_EXIT):
            self._leave(batch)
        elif self._save_every != "epoch" and self._is_due() and not self._ends_epoch(batch):
            self._save(Place(self._steps, self._epoch, batch + 1))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        steps = self.params.get("steps")
        if steps:  # The last execution may have had fewer.
            self._steps = self._steps_before + steps
        ends = epoch + 1 >= self.params["epochs"] or self.model.stop_training
        # Where snapshots stay, a call of `fit` that has ended does nothing the next time.
        if self._save_every == "epoch" or self._is_due() or (ends and not self._delete):
            self._save(self._between_epochs())

    def on_train_end(self, logs: Any = None) -> None:
        set_initial_epoch(self.model, None)
        self._writer.wait()
        if self._delete:
            # Not before all have trained to the end: one that fails now has to be able to resume.
            self._workers.exchange("training has ended", "")
            self._folder.clear()

    def on_group_change(self, old: Any, new: Any) -> None:
        extended = self.model.distribute_strategy.extended
        self._writer.wait()
        self._workers = workers_of(extended)
        self._run = self._workers.exchange("run", self._run)[0]
        self._writes_shared = writes_for_others(self._folder.path, self._workers, extended)
        self._held, self._last = [], None

    def state_dict(self) -> dict[str, Any]:
        """How far the training is, for a worker that joins it."""
        return {"steps": self._steps_before, "last_saved": self._last_saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets how far the training was before the running epoch."""
        self._steps, self._last_saved = state["steps"], state["last_saved"]

    def _restore(self) -> None:
        restored = read_newest(
            self._folder,
            lambda stored: held_by(self.model, stored),
            self._workers,
            holds_all=not self.model.distribute_strategy.extended.in_stages,
        )
        if restored is None:
            return
        rank = self._workers.rank
        resume = Resumption(restored, self.model, self._others, rank)
        place = resume.place
        self._steps = self._last_saved = place.steps
        record.resumed_at(place.steps)
        self._folder.forget_later_than(restored.snapshot)
        self._complete = [restored.snapshot]
        set_initial_epoch(self.model, place.epoch)
        resume.load()
        if place.batch:
            # Once more when the epoch has begun: callbacks change the state at its beginning.
            self._steps -= place.batch
            self._data.resume_within_epoch(
                resume.position, place.epoch, place.batch, lambda: self._resumed(resume)
            )
        else:
            self._data.resume_between_epochs(resume.position, place.epoch)
            self._resumed(resume)
            if place.stopped:
                set_initial_epoch(self.model, self.params["epochs"])
        if rank == 0:
            say(
                f"tfdist: training resumes at epoch {place.epoch + 1}, batch {place.batch + 1}, "
                f"after {place.steps} steps, from the snapshots in {self._folder.path}."
            )
            if restored.lost:
                say(
                    f"tfdist: the snapshot is of {restored.snapshot.size} workers, and these are "
                    f"{self._workers.size}; not taken over: {names(restored.lost)}."
                )

    def _resumed(self, resume: Resumption) -> None:
        resume.load()
        if self._data.skipped and self._workers.rank == 0:
            batches, seconds = self._data.skipped
            say(
                f"tfdist: the position in the data could not be saved; {batches} batches were read "
                f"again to get there, which took {seconds:.1f} s."
            )

    def _is_due(self) -> bool:
        if self._save_every == "epoch":
            return False
        return self._steps // self._save_every > self._last_saved // self._save_every

    def _ends_epoch(self, batch: int) -> bool:
        steps = self.params.get("steps")
        return bool(steps) and batch + 1 >= steps

    def _between_epochs(self) -> Place:
        return Place(self._steps, self._epoch + 1, 0, bool(self.model.stop_training))

    def _save(self, place: Place) -> None:
        snapshot = SnapshotId(place.steps, self._run, self._workers.size)
        self._note_complete()
        if not self._held:  # It takes a while where parts of a whole have to be numbered.
            self._held = held_by(self.model)
        write = take(
            self.model,
            self._held,
            self._others,
            self._data,
            place,
            self._workers.rank,
            shared=self._writes_shared,
            complete=self._complete[-1].step if self._complete else None,
        )
        oldest = self._complete[-self._keep :][:1]

        def write_and_prune() -> None:
            write(self._folder, snapshot)
            for kept in oldest:
                self._folder.forget_earlier_than(kept)

        self._last_saved, self._last = place.steps, snapshot
        self._writer.submit(place.steps, write_and_prune)

    def _note_complete(self) -> None:
        """Records whether all workers have written their parts of the last snapshot."""
        if self._last is None:
            return
        self._writer.wait()
        failed = self._workers.exchange("snapshot written", str(self._writer.failed))
        if str(True) not in failed:
            self._complete.append(self._last)

    def _leave(self, batch: int) -> None:
        """Saves and exits, as SIGTERM has asked one of the workers."""
        self._save(Place(self._steps, self._epoch, batch + 1))
        self._writer.wait()
        failed = self._workers.exchange("preempted", str(self._writer.failed))
        if self._workers.rank == 0:
            state = "is lost" if str(True) in failed else f"is saved in {self._folder.path}"
            say(
                f"tfdist: SIGTERM: the state after {self._steps} steps {state}; exiting with code "
                f"{PREEMPTED}, to be started again."
            )
        raise SystemExit(1 if str(True) in failed else PREEMPTED)


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
