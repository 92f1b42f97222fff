"""Has all workers begin a training with one state, whatever callbacks restore when it begins.

Workers without a shared disk, or with separate working folders, find other files than the chief.
"""

from __future__ import annotations

import json
from typing import Any

import keras
import tensorflow as tf

from tfdist._src.cluster.net.wait_messages import say
from tfdist._src.group.group import Group
from tfdist._src.internals.iterators import initial_epoch, set_initial_epoch
from tfdist._src.keras.fit.compared_state import StageComparison, StateComparison
from tfdist._src.keras.saving.compression_files import compressor_of
from tfdist._src.keras.saving.files import awaits_admission, group_of, in_stages, needs_gathering
from tfdist._src.strategy.variables import assignments
from tfdist.errors import UnsupportedError


class BeginTogether(keras.callbacks.Callback):  # type: ignore[misc]
    """Compares the state after all other callbacks have seen the training begin.

    If it differs because of them, all workers receive the chief's.

    Attributes:
        first: a callback to be called before all others.
    """

    communicates_in = ("on_train_begin",)

    class First(keras.callbacks.Callback):  # type: ignore[misc]
        """Records the state before callbacks see the training begin."""

        assignments = 0
        awaits_admission = False

        def on_train_begin(self, logs: Any = None) -> None:
            self.assignments = assignments()
            self.awaits_admission = awaits_admission(self.model)

    def __init__(self) -> None:
        super().__init__()
        self.first = self.First()

    def on_train_begin(self, logs: Any = None) -> None:
        group = group_of(self.model)
        if group is None or self.first.awaits_admission:
            return  # A worker that is admitted meanwhile gets the others' state.
        changed = assignments() != self.first.assignments
        epoch, updates = initial_epoch(self.model), _updates_of(self.model)
        texts = group.exchange("how training begins", json.dumps([epoch, updates, changed]))
        places = [(epoch, updates) for epoch, updates, _ in map(json.loads, texts)]
        if not any(json.loads(text)[2] for text in texts) and len(set(places)) == 1:
            return
        kind = StageComparison if in_stages(self.model) else StateComparison
        compared = kind(self.model)
        found = compared.difference()
        if found or len(set(places)) > 1:
            self._share(group, _described(group, places, found), places[0][0], compared)

    def _share(self, group: Group, found: str, epoch: int, compared: StateComparison) -> None:
        """Has all workers begin with the chief's state.

        Raises:
            UnsupportedError: each worker keeps a part of the model.
        """
        extended = self.model.distribute_strategy.extended
        if needs_gathering(self.model) or compressor_of(self.model) is not None:
            raise UnsupportedError(
                "A callback such as BackupAndRestore must find the same files on all workers if "
                f"each keeps a part of the model. Received: {self.model.name!r}, where {found}. "
                "Pass the path of a shared disk, or use tfdist.callbacks.BackupAndRestore."
            )
        if group.topology.is_chief:
            say(f"tfdist: {found}. All go on with the state of {group.topology.workers[0]}.")
        set_initial_epoch(self.model, epoch)
        for variable in compared.variables().values():
            value = variable if isinstance(variable, tf.Variable) else variable.value
            variable.assign(extended.workers.broadcast(tf.convert_to_tensor(value.values[0])))


def _updates_of(model: keras.Model) -> int:
    """The number of updates of a model's optimizer so far."""
    optimizer = getattr(model, "optimizer", None)
    return 0 if optimizer is None else int(optimizer.iterations.numpy())


def _described(group: Group, places: list[tuple[int, int]], found: str) -> str:
    other = next((i for i, place in enumerate(places) if place != places[0]), None)
    text = "callbacks have restored different states when the training began"
    if other is not None:
        chief, worker = (
            f"{group.topology.workers[rank]} goes on from epoch {epoch} after {updates} updates"
            for rank, (epoch, updates) in ((0, places[0]), (other, places[other]))
        )
        text += f": {chief}, and {worker}"
    return f"{text}{': ' if other is None else ', and '}{found}" if found else text
