"""Where a training stands, for a worker that joins it; the variables are shared separately."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from tfdist._src.keras.fit.data_position import TrainingData
from tfdist._src.keras.fit.delivered_once import DeliveredOnce
from tfdist._src.keras.fit.own_batches import OwnBatches
from tfdist._src.keras.fit.position import Position
from tfdist._src.snapshots.callback_states import load_states, states_of
from tfdist._src.snapshots.held_state import held_by
from tfdist._src.snapshots.part_file import Array, PartFile, Piece, part_bytes
from tfdist._src.strategy.random_state import random_states, set_random_states

_POSITION = "position of the data"
_FRESH = "beginning of the data"


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where a call of `fit` is entered.

    Attributes:
        document: what JSON can represent.
        arrays: the rest.
    """

    document: dict[str, Any]
    arrays: dict[str, Array]

    @property
    def batches(self) -> int:
        """How many of its batches have been trained."""
        return int(self.document["batches"])

    @property
    def epoch(self) -> int:
        """The epoch that was read last."""
        return int(self.document["epoch"])


def entry_of(callbacks: DeliveredOnce, data: TrainingData, batches: int) -> Entry:
    """Describes where this worker's call of `fit` is.

    Args:
        callbacks: its callbacks.
        data: its data.
        batches: how many batches of the epoch that was read last have been trained.
    """
    live, own = data.live, data.own
    assert live is not None
    states, arrays = states_of(callbacks.callbacks)
    position = data.read_trained(batches)
    arrays |= {
        name: np.frombuffer(value, np.uint8)
        for name, value in ((_POSITION, position.state), (_FRESH, position.fresh))
        if value is not None
    }
    document = {
        "epoch": live.read,
        "batches": batches,
        "batches_before": live.batches_before,
        "has_ended": live.has_ended,
        "has_untrained": live.has_untrained(batches),
        "logs": live.logs,
        "callbacks": states,
        "epochs_begun": callbacks.epochs_begun,
        "own": dataclasses.asdict(own) if own is not None and own.is_shared_out else None,
        "position": position.to_json(),
        "random": random_states(),
    }
    return Entry(document, arrays)


def enter_at(
    entry: Entry,
    epoch: int,
    callbacks: DeliveredOnce,
    data: TrainingData,
    restore_metrics: Callable[[], object],
) -> None:
    """Prepares this worker's call of `fit`, which has just begun, to go on there.

    Args:
        entry: where another worker is.
        epoch: the epoch that all enter.
        callbacks: this worker's.
        data: its data.
        restore_metrics: sets the metrics of the running epoch.
    """
    document, live = entry.document, data.live
    assert live is not None
    state, fresh = (
        entry.arrays[name].tobytes() if name in entry.arrays else None
        for name in (_POSITION, _FRESH)
    )
    position = Position.from_json(document["position"], state, fresh)
    data.follow(position)
    live.logs = document["logs"]
    variables = [held for held in held_by(callbacks.model) if held.is_common]
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
    if document["own"] is not None:
        # For this group nothing has been distributed here.
        data.own = dataclasses.replace(OwnBatches(**document["own"]), generation=-1)
    if document["own"] is not None and (epoch > entry.epoch or not batches):
        pass  # All begin an epoch, and share the data out.
    elif document["has_ended"] or epoch < entry.epoch:
        if epoch < entry.epoch:  # It has made an iterator for the next epoch already.
            made = position.iterators - 1
            position = dataclasses.replace(position, iterators=made, fresh=None)
        data.resume_between_epochs(position, epoch + 1)
        live.resume_behind(epoch, document["batches" if epoch == entry.epoch else "batches_before"])
    elif batches or document["has_untrained"] or position.begun:

        def ready() -> None:
            set_random()  # Until now there were those with which the others began to read.
            restore_metrics()
            if document["has_untrained"] and position.state is not None and document["own"] is None:
                live.replay.request()

        data.joins = True
        set_random()
        data.resume_within_epoch(position, epoch, batches, ready)
        return
    set_random()


def encode(entry: Entry) -> bytes:
    """An entry as bytes, for other workers."""
    pieces = [Piece(key, values) for key, values in entry.arrays.items()]
    return part_bytes(pieces, entry.document)


def decode(contents: bytes) -> Entry:
    """The entry of `encode`."""
    part = PartFile(contents, "the entry")
    arrays = {key: part.values(number) for number, (key, _) in enumerate(part.keys)}
    return Entry(part.document, arrays)
