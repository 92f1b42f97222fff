"""Writes the snapshots of a training run in the background, and manages their folder."""

import collections
import threading
from collections.abc import Callable
from pathlib import Path

import keras

from tfdist._src.log import logger
from tfdist._src.snapshots import worker_state
from tfdist._src.snapshots.restore import Restored, SnapshotFolder, SnapshotId, new_run, read_newest
from tfdist._src.snapshots.workers import Workers, workers_of, writes_shared_state
from tfdist._src.strategy.extended import ReplicatedExtended
from tfdist.errors import SnapshotError


class SnapshotWriter:
    """Runs functions in a thread, one after the other.

    If a function fails, only its snapshot is lost: training continues, and a message reports the
    failure.

    Args:
        asynchronous: whether `submit` returns before the function has ended.
    """

    def __init__(self, *, asynchronous: bool) -> None:
        self._asynchronous = asynchronous
        self._thread: threading.Thread | None = None
        self.failed = False

    def submit(self, step: int, write: Callable[[], object]) -> None:
        """Runs a function, after the previous function has ended.

        Args:
            step: the step of the snapshot, for messages.
            write: writes the snapshot.
        """
        self.wait()

        def run() -> None:
            self.failed = True
            try:
                write()
                self.failed = False
            except Exception as error:  # A failed snapshot must not end training.
                logger.error(
                    f"the snapshot of step {step} could not be written: "
                    f"{type(error).__name__}: {error}. "
                    "Training continues, and later snapshots will be attempted. Free space, or "
                    "correct the directory of tfdist.callbacks.BackupAndRestore."
                )

        # At exit, Python waits for threads that are not daemons.
        self._thread = threading.Thread(target=run, name="tfdist-snapshot", daemon=False)
        self._thread.start()
        if not self._asynchronous:
            self.wait()

    def wait(self) -> None:
        """Waits until no write is running."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


# Maps each folder of snapshots to the number of calls of `fit` in this process that used it.
_calls: collections.Counter[Path] = collections.Counter()


class SnapshotSeries:
    """Writes the snapshots of a training run in the background, and deletes old snapshots.

    Args:
        folder: the folder of the snapshots.
        keep: the number of complete snapshots to keep.
        asynchronous: whether training continues while a snapshot is written.

    Attributes:
        folder: the folder of the snapshots.
        writes_shared: whether this worker writes the state that other workers also hold.
        call: the number of this call among all calls of `fit` that use the folder. The first call
            has the number 1.
    """

    workers: Workers

    def __init__(self, folder: SnapshotFolder, *, keep: int, asynchronous: bool) -> None:
        self.folder = folder
        self.writes_shared = False
        self.call = 0
        self._keep = keep
        self._writer = SnapshotWriter(asynchronous=asynchronous)
        self._run = ""
        self._last: SnapshotId | None = None
        self._complete: list[SnapshotId] = []
        self._loaded: Restored | None = None

    def begin(self, extended: ReplicatedExtended) -> None:
        """Begins the series for a call of `fit`; all workers must call this method."""
        self._complete = []
        self.call = _calls[self.folder.path] + 1
        self._set_workers(extended, new_run())

    def change_workers(self, extended: ReplicatedExtended) -> None:
        """Continues with the workers of a new group; all of them must call this method."""
        self._writer.wait()
        self._set_workers(extended, self._run, tolerate_failure=True)

    def load_newest(self, model: keras.Model) -> SnapshotId | None:
        """Reads the newest usable snapshot, and keeps it for `loaded_or_newest`.

        All workers must call this method.

        Returns:
            The identity of the snapshot; None if there is no snapshot.

        Raises:
            SnapshotError: the snapshots are of another model, or all are damaged.
        """
        if self._loaded is not None:
            self._loaded.parts.close()
        self._loaded = read_newest(
            self.folder,
            lambda stored: worker_state.held_variables(model, stored),
            self.workers,
            worker_state.optimizer_classes(model),
            whole_parts=worker_state.parts_held_entirely(model),
        )
        return None if self._loaded is None else self._loaded.snapshot

    def loaded_or_newest(self, model: keras.Model) -> Restored | None:
        """Returns the snapshot from `load_newest`, which is called if no snapshot is loaded.

        All workers must call this method.

        Raises:
            SnapshotError: see `load_newest`; also if the snapshot is of a later call of `fit`.
        """
        if self._loaded is None:
            self.load_newest(model)
        restored, self._loaded = self._loaded, None
        if restored is not None:
            call = restored.document["call"]
            if call > self.call:
                raise SnapshotError(
                    f"The snapshots in {str(self.folder.path)!r} are of call {call} of `fit` with "
                    f"this directory, and this is call {self.call}. Give each call a directory of "
                    "its own, or delete this one to train from the beginning."
                )
            # Continue the call of `fit` that took the snapshot. This process itself may have begun
            # that call, which was then interrupted.
            self.call = _calls[self.folder.path] = call
        return restored

    def resume_from(self, snapshot: SnapshotId) -> None:
        """Continues the series from a snapshot that an earlier call has taken.

        All later snapshots are deleted.
        """
        self.folder.delete_after(snapshot)
        self._complete = [snapshot]

    @property
    def complete(self) -> int | None:
        """The step of the last snapshot that all workers are known to have written, or None."""
        return self._complete[-1].step if self._complete else None

    def finish_last(self) -> bool:
        """Waits until the last snapshot is written, and returns whether all workers wrote it.

        All workers must call this method.
        """
        self._writer.wait()
        if self._last is None:
            return False
        last, self._last = self._last, None
        failed = self.workers.exchange("snapshot written", str(self._writer.failed))
        if str(True) in failed:
            return False
        self._complete.append(last)
        return True

    def add(self, step: int, write: Callable[[SnapshotFolder, SnapshotId], None]) -> None:
        """Begins to write a snapshot; `finish_last` must have finished the previous snapshot.

        Args:
            step: the number of trained steps.
            write: a function that writes this worker's part. It runs in another thread.
        """
        snapshot = SnapshotId(step, self._run, self.workers.size)
        oldest = self._complete[-self._keep :][:1]

        def write_and_prune() -> None:
            write(self.folder, snapshot)
            for kept in oldest:
                self.folder.delete_before(kept)

        self._last = snapshot
        self._writer.submit(step, write_and_prune)

    def wait(self) -> None:
        """Waits until this worker has finished writing."""
        self._writer.wait()

    def end(self, *, delete: bool) -> None:
        """Ends the series, once all workers have trained to the end.

        Args:
            delete: whether to delete the snapshots, because no later call will resume from them.
        """
        self._writer.wait()
        if delete:
            self.folder.clear()

    def _set_workers(
        self, extended: ReplicatedExtended, run: str, *, tolerate_failure: bool = False
    ) -> None:
        self.workers, self._last = workers_of(extended), None
        answers = self.workers.exchange("run", f"{self.call} {run}")
        self._run = answers[0].partition(" ")[2]
        # A process that joined the job later has counted fewer calls.
        self.call = max(int(answer.partition(" ")[0]) for answer in answers)
        _calls[self.folder.path] = self.call
        self.writes_shared = writes_shared_state(
            self.folder.path, self.workers, extended, tolerate_failure=tolerate_failure
        )
