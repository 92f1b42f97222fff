"""The whole state of a call of `fit` between two steps: taken, written, and put back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from tfdist.elastic.callback_states import load_states, states_of
from tfdist.elastic.compression_states import codec_arrays, load_codec_arrays
from tfdist.elastic.held_state import Held, as_pieces, read_all
from tfdist.elastic.part_file import Array, Piece, write_part
from tfdist.elastic.restore import Restored
from tfdist.elastic.snapshot_folder import SnapshotFolder, SnapshotId
from tfdist.strategies.random_state import random_states, set_random_states
from tfdist.trainer.fit.data_position import Position

_POSITION = "position of the data of worker"
_FRESH = "beginning of the data of worker"


@dataclass(frozen=True)
class Place:
    """Between which steps of a training.

    Attributes:
        steps: the number of steps that have been trained.
        epoch: the number of epochs that have ended.
        batch: the number of batches of the next epoch that have been trained.
        stopped: whether a callback has ended the training with the last epoch.
    """

    steps: int
    epoch: int
    batch: int
    stopped: bool = False


def take(
    model: keras.Model,
    held: Sequence[Held],
    callbacks: Sequence[Any],
    position: Position,
    place: Place,
    rank: int,
    *,
    shared: bool,
    complete: int | None,
) -> Callable[[SnapshotFolder, SnapshotId], None]:
    """Takes the state without waiting for a copy of it.

    Args:
        model: in training.
        held: its variables on this worker.
        callbacks: all of them, in their order.
        position: where its data stands.
        place: where training stands.
        rank: this worker's rank.
        shared: whether this worker also writes what others hold as well.
        complete: the step of the last snapshot that all workers have written, if any.

    Returns:
        Writes this worker's part, from any thread.
    """
    read = read_all(held, rank, shared=shared)
    states, arrays = states_of(callbacks)
    own = {**codec_arrays(model, rank), **(arrays if shared else {})}
    if position.state is not None:
        own[f"{_POSITION} {rank}"] = np.frombuffer(position.state, np.uint8)
    if position.fresh is not None:
        own[f"{_FRESH} {rank}"] = np.frombuffer(position.fresh, np.uint8)
    document = {
        "complete": complete,
        "place": dataclasses.asdict(place),
        "callbacks": states,
        "position": dataclasses.asdict(dataclasses.replace(position, state=None, fresh=None)),
        "random": random_states(),
    }

    def write(folder: SnapshotFolder, snapshot: SnapshotId) -> None:
        pieces = [*as_pieces(read), *(Piece(key, value) for key, value in own.items())]
        folder.prepare(snapshot)
        write_part(folder.part(snapshot, rank), pieces, document)

    return write


class Resumption:
    """Puts a state back.

    Args:
        restored: a snapshot that has been read.
        model: in training.
        callbacks: all of them, in their order.
        rank: this worker's rank.
    """

    def __init__(
        self, restored: Restored, model: keras.Model, callbacks: Sequence[Any], rank: int
    ) -> None:
        self._restored, self._model, self._callbacks = restored, model, callbacks
        self._rank = rank
        self.place = Place(**restored.document["place"])
        parts = restored.parts
        states = restored.document["callbacks"]
        self._weights = {key: parts.whole(key) for key in parts.keys if key.startswith("callback ")}
        self._states = states
        self._codecs: dict[str, Array] = {}
        state = fresh = None
        if restored.is_own:
            prefix = f"compression/worker {rank}/"
            self._codecs = {k: parts.whole(k) for k in parts.keys if k.startswith(prefix)}
            # Its buffers hold this worker's rows, so it is of no use to another number of workers.
            if f"{_POSITION} {rank}" in parts:
                state = parts.whole(f"{_POSITION} {rank}").tobytes()
            if f"{_FRESH} {rank}" in parts:
                fresh = parts.whole(f"{_FRESH} {rank}").tobytes()
        self.position = Position(
            **{**restored.document["position"], "state": state, "fresh": fresh}
        )
        parts.close()

    def load(self) -> None:
        """Sets all variables, what callbacks remember, and the random states."""
        self._restored.assign()
        load_codec_arrays(self._model, self._rank, self._codecs)
        load_states(self._callbacks, self._states, self._weights.__getitem__)
        set_random_states(self._restored.document["random"])
