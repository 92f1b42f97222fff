"""Transfers the state of training to a joining worker."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist._src.keras.fit.delivered_once import DeliveredOnce
from tfdist._src.keras.fit.metric_state import MetricTotals
from tfdist._src.keras.fit.position import Position, SeparateBatches
from tfdist._src.keras.fit.training_data import TrainingData
from tfdist._src.snapshots.part_file import Array, PartFile, StoredArray, part_bytes
from tfdist._src.snapshots.worker_state import held_variables, load_states, states_of
from tfdist._src.strategy.multi_worker import random_states, set_random_states
from tfdist.errors import ProgramMismatchError

_POSITION = "position of the data"
_FRESH = "beginning of the data"


@dataclasses.dataclass(frozen=True)
class EntryPosition:
    """The position at which a joining worker enters a call of `fit`.

    Attributes:
        document: the part of the position that JSON can represent.
        arrays: the other parts of the position, by name.
    """

    document: dict[str, Any]
    arrays: dict[str, Array]

    @property
    def batches(self) -> int:
        """The number of batches of `epoch` that have been trained."""
        return int(self.document["batches"])

    @property
    def epoch(self) -> int:
        """The last epoch for which data was read."""
        return int(self.document["epoch"])


def entry_of(callbacks: DeliveredOnce, data: TrainingData, batches: int) -> EntryPosition:
    """Describes the current position of this worker's call of `fit`.

    Args:
        callbacks: the worker's callbacks.
        data: the training data.
        batches: the number of trained batches in the last epoch for which data was read.
    """
    reentry, separate = data.reentry, data.separate
    assert reentry is not None
    states, arrays = states_of(callbacks.callbacks)
    position = data.read_trained(batches)
    arrays |= {
        name: np.frombuffer(value, np.uint8)
        for name, value in ((_POSITION, position.state), (_FRESH, position.fresh))
        if value is not None
    }
    document = {
        "epoch": reentry.read,
        "batches": batches,
        "batches_before": reentry.batches_before,
        "has_ended": reentry.has_ended,
        "has_untrained": reentry.has_untrained(batches),
        "logs": reentry.logs,
        "callbacks": states,
        "epochs_begun": callbacks.epochs_begun,
        "separate": (
            dataclasses.asdict(separate)
            if separate is not None and separate.is_shared_out
            else None
        ),
        "position": position.to_json(),
        "random": random_states(),
    }
    return EntryPosition(document, arrays)


def enter_at(
    entry: EntryPosition,
    epoch: int,
    callbacks: DeliveredOnce,
    data: TrainingData,
    restore_metrics: Callable[[], object],
) -> None:
    """Prepares this worker's call of `fit`, which has just begun, to continue at a position.

    Args:
        entry: the position of another worker.
        epoch: the epoch that all workers enter.
        callbacks: this worker's callbacks.
        data: this worker's data.
        restore_metrics: a function that restores the metrics of the running epoch.
    """
    document, reentry = entry.document, data.reentry
    assert reentry is not None
    state, fresh = (
        entry.arrays[name].tobytes() if name in entry.arrays else None
        for name in (_POSITION, _FRESH)
    )
    position = Position.from_json(document["position"], state, fresh)
    data.follow(position)
    reentry.logs = document["logs"]
    variables = [held for held in held_variables(callbacks.model) if held.is_common]
    taken_over = [(held, held.read()) for held in variables]

    def load_callbacks() -> None:
        load_states(callbacks.callbacks, document["callbacks"], entry.arrays.__getitem__)

    def restore() -> None:
        for held, value in taken_over:
            held.assign(value)
        load_callbacks()

    def set_random() -> None:
        set_random_states(document["random"])

    load_callbacks()
    callbacks.enter_at(epoch, document["epochs_begun"], restore)
    batches = document["batches"]
    if document["separate"] is not None:
        # The generation -1 means that this worker has not divided any data for a group yet.
        data.separate = dataclasses.replace(SeparateBatches(**document["separate"]), generation=-1)
    if document["separate"] is not None and (epoch > entry.epoch or not batches):
        pass  # All workers begin an epoch, and divide the data again.
    elif document["has_ended"] or epoch < entry.epoch:
        if epoch < entry.epoch:  # The sender has already made an iterator for the next epoch.
            made = position.iterators - 1
            position = dataclasses.replace(position, iterators=made, fresh=None)
        data.resume_between_epochs(position, epoch + 1)
        reentry.resume_behind(
            epoch, document["batches" if epoch == entry.epoch else "batches_before"]
        )
    elif batches or document["has_untrained"] or position.begun:

        def ready() -> None:
            set_random()  # Until now, the generators had the states of the beginning of the epoch.
            restore_metrics()
            if (
                document["has_untrained"]
                and position.state is not None
                and document["separate"] is None
            ):
                reentry.replay.request()

        data.joins = True
        set_random()
        data.resume_within_epoch(position, epoch, batches, ready)
        return
    set_random()


def encode(entry: EntryPosition) -> bytes:
    """Serializes a position for other workers."""
    stored = [StoredArray(key, values) for key, values in entry.arrays.items()]
    return part_bytes(stored, entry.document)


def decode(contents: bytes) -> EntryPosition:
    """Returns the position that `encode` has serialized."""
    part = PartFile(contents, "the entry")
    arrays = {key: part.values(number) for number, (key, _) in enumerate(part.keys)}
    return EntryPosition(part.document, arrays)


Broadcast = Callable[[tf.Tensor, int], tf.Tensor]
_MAX_KEPT_BYTES = 1 << 30
"""The limit of host memory for copies. If they exceed it, `put_back` restores nothing."""


class ReplacedValues:
    """Keeps the values that a transfer replaces, to put them back if the transfer fails."""

    def __init__(self) -> None:
        self._kept: list[tuple[Callable[[Any], object], tf.Tensor]] = []
        self._bytes = 0

    def keep(self, value: tf.Tensor, assign: Callable[[Any], object]) -> None:
        """Keeps the value of a variable that is about to be assigned."""
        self._bytes += value.dtype.size * value.shape.num_elements()
        if self._bytes > _MAX_KEPT_BYTES:
            self._kept = []
            return
        with tf.device("CPU:0"):
            self._kept.append((assign, tf.identity(value)))

    def put_back(self) -> bool:
        """Assigns the kept values again, and returns whether all replaced values were kept."""
        for assign, value in self._kept:
            assign(value)
        return self._bytes <= _MAX_KEPT_BYTES


def share_state(
    model: keras.Model,
    totals: MetricTotals,
    workers: Any,
    source: int,
    *,
    takes: bool,
    replaced: ReplacedValues | None,
) -> None:
    """Broadcasts weights, the optimizer's state and the metrics' totals.

    Values that differ between workers, such as shards of the optimizer's state, are left out. All
    workers must call this function.

    Args:
        model: the model in training.
        totals: the totals of the model's metrics.
        workers: the communicator of the workers that hold the same part of the model.
        source: the rank that has the state.
        takes: whether this worker assigns the received values.
        replaced: keeps this worker's values that are replaced; None if they will not be needed.

    Raises:
        ProgramMismatchError: a worker lacks a variable of the state. All workers raise this error.
    """
    held = {one.key: (one.read, one.assign) for one in held_variables(model) if one.is_common}
    kept = {key: (total.read_value, total.assign) for key, total in totals.by_place().items()}
    state = {**held, **kept}
    of_all = _gather_names(list(state), workers)
    if missing := sorted(key for keys in of_all for key in keys ^ of_all[0]):
        raise ProgramMismatchError(
            f"A worker that joins a running job must have all variables of its model when `fit` "
            f"begins. Received: a model without {missing[0]!r}. Create all layers, optimizers and "
            "metrics in the strategy's scope, and build them before `fit`."
        )
    for read, assign in state.values():
        _share(read(), assign, workers.broadcast, source, takes, replaced)


def _gather_names(names: Sequence[str], workers: Any) -> list[set[str]]:
    line = f"{json.dumps(names)}\n".encode()
    lines = workers.all_gather(tf.constant(np.frombuffer(line, np.uint8))).numpy().tobytes()
    return [set(json.loads(line)) for line in lines.splitlines()]


def _share(
    value: tf.Tensor,
    assign: Callable[[Any], object],
    broadcast: Broadcast,
    source: int,
    takes: bool,
    replaced: ReplacedValues | None,
) -> None:
    given = broadcast(value, source)
    if takes:
        if replaced is not None:
            replaced.keep(value, assign)
        assign(given)
