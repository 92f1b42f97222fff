"""Takes, writes and restores the whole state of a call of `fit` between two steps."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from tfdist._src.keras.fit.position import Position
from tfdist._src.keras.fit.validation_data import NextValidation
from tfdist._src.log import logger
from tfdist._src.snapshots import restore, worker_state
from tfdist._src.snapshots.part_file import Array, PartIndex, StoredArray, write_part
from tfdist._src.snapshots.snapshot_series import SnapshotSeries
from tfdist._src.snapshots.workers import Workers
from tfdist._src.strategy.multi_worker import random_states, set_random_states


@dataclass(frozen=True)
class TrainingPosition:
    """A position between two steps of training.

    Attributes:
        steps: the number of trained steps.
        epoch: the number of epochs that have ended.
        batch: the number of trained batches of the next epoch.
        stopped: whether a callback has stopped training at the end of the last epoch.
    """

    steps: int
    epoch: int
    batch: int
    stopped: bool = False


def take_snapshot(
    model: keras.Model,
    held: Sequence[worker_state.HeldVariable],
    callbacks: Sequence[Any],
    position: Position,
    validation: NextValidation,
    training_position: TrainingPosition,
    series: SnapshotSeries,
) -> Callable[[restore.SnapshotFolder, restore.SnapshotId], None]:
    """Captures the state of training, without waiting until the values are copied.

    Args:
        model: the model in training.
        held: the model's variables on this worker.
        callbacks: all callbacks, in their order.
        position: the position in the training data.
        validation: the input of the next validation.
        training_position: the number of trained steps, epochs and batches.
        series: the series that the snapshot belongs to.

    Returns:
        A function that writes this worker's part. Any thread may call this function.
    """
    rank, shared = series.workers.rank, series.writes_shared
    read = worker_state.read_all(held, rank, shared=shared)
    states, arrays = worker_state.states_of(callbacks)
    own = {**worker_state.codec_arrays(model, rank), **(arrays if shared else {})}
    positions = {
        restore.POSITION: position.state,
        restore.FRESH: position.fresh,
        restore.VALIDATION: validation.position,
    }
    for name, contents in positions.items():
        if contents is not None:
            own[f"{name} {rank}"] = np.frombuffer(contents, np.uint8)
    document = {
        "complete": series.complete,
        "call": series.call,
        "optimizers": worker_state.optimizer_classes(model),
        "place": dataclasses.asdict(training_position),
        "callbacks": states,
        "position": position.to_json(),
        "validation": {"again": validation.again, "made": validation.made},
        "random": random_states(),
    }

    def write(folder: restore.SnapshotFolder, snapshot: restore.SnapshotId) -> None:
        stored = [
            *worker_state.stored_arrays(read),
            *(StoredArray(key, value) for key, value in own.items()),
        ]
        folder.prepare(snapshot)
        write_part(folder.part(snapshot, rank), stored, document)

    return write


class Resumption:
    """Restores the state of training from a snapshot.

    Args:
        restored: a snapshot that has been read.
        model: the model in training.
        callbacks: all callbacks, in their order.
        workers: all workers.
        elastic: whether the group of workers may change.

    Attributes:
        training_position: the position at which training continues.
        position: the position in the training data at which training continues.
        validation: the input of the next validation.
    """

    def __init__(
        self,
        restored: restore.Restored,
        model: keras.Model,
        callbacks: Sequence[Any],
        workers: Workers,
        *,
        elastic: bool,
    ) -> None:
        self._restored, self._model, self._callbacks = restored, model, callbacks
        self._workers, rank = workers, workers.rank
        self.training_position = TrainingPosition(**restored.document["place"])
        parts = restored.parts
        states = restored.document["callbacks"]
        self._weights = {key: parts.whole(key) for key in parts.keys if key.startswith("callback ")}
        self._states = states
        self._codecs: dict[str, Array] = {}
        source = rank if restored.is_own else None
        if restored.is_own:
            prefix = f"compression/worker {rank}/"
            self._codecs = {k: parts.whole(k) for k in parts.keys if k.startswith(prefix)}
        elif elastic and restored.document["position"].get("is_common"):
            # A position that is not common to all workers includes buffers with one worker's rows,
            # which other workers cannot use.
            source = next((r for r in parts.ranks if _has_position(parts, r)), None)
        state, fresh, validation = (
            parts.whole(f"{name} {source}").tobytes() if f"{name} {source}" in parts else None
            for name in (restore.POSITION, restore.FRESH, restore.VALIDATION)
        )
        self.position = Position.from_json(restored.document["position"], state, fresh)
        self.validation = NextValidation(validation, **restored.document["validation"])
        parts.close()

    def announce(self) -> None:
        """Reports on rank 0 the position at which training continues, and any lost state."""
        if self._workers.rank:
            return
        reached, restored = self.training_position, self._restored
        logger.info(
            f"training resumes at epoch {reached.epoch + 1}, batch {reached.batch + 1}, "
            f"after {reached.steps} steps, from the snapshots in {restored.folder}."
        )
        if restored.lost:
            logger.warning(
                f"the snapshot is of {restored.snapshot.size} workers, and there are now "
                f"{self._workers.size}; not restored: {restore.names(restored.lost)}."
            )

    def load(self, skipped: tuple[int, float] | None = None) -> None:
        """Restores all variables, the states of callbacks, and the random states.

        Args:
            skipped: the number of batches that were read again to reach the position in the data,
                and the seconds that this took; None if no batches were read again.
        """
        self._restored.assign()
        worker_state.load_codec_arrays(self._model, self._workers.rank, self._codecs)
        worker_state.load_states(self._callbacks, self._states, self._weights.__getitem__)
        set_random_states(self._restored.document["random"])
        if skipped is not None and self._workers.rank == 0:
            batches, seconds = skipped
            logger.warning(
                f"the position in the data could not be saved; {batches} batches were read "
                f"again to reach it, which took {seconds:.1f} s."
            )


def _has_position(parts: PartIndex, rank: int) -> bool:
    return any(f"{name} {rank}" in parts for name in (restore.POSITION, restore.VALIDATION))
