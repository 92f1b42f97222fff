"""Graphs that know something of a former group of workers."""

from __future__ import annotations

import time

import keras

from tfdist._src.cluster.net.wait_messages import say


class StaleGraphs:
    """Has a model's steps be traced again if they may know ranks or the number of workers.

    Args:
        model: in training.
        divided: whether the workers hold stages of it, whose functions follow the group.
    """

    def __init__(self, model: keras.Model, *, divided: bool) -> None:
        self._model, self._extended = model, model.distribute_strategy.extended
        self._divided = divided
        self._traces = False  # whether the next step does
        self._began = 0.0

    def group_changes(self) -> None:
        """Has the next step be traced where that is needed."""
        if not (self._divided or self._extended.traces_know_group):
            return
        self._traces = True
        self._extended.traces_know_group = False
        if not self._divided:
            # Also of a newcomer, whose `fit` has made it already.
            self._model.make_train_function(force=True)
            self._model.test_function = self._model.predict_function = None

    def step_begins(self) -> None:
        """Takes the time of a step that is traced."""
        self._began = time.monotonic()

    def step_ends(self) -> None:
        """Has rank 0 say how long it took if it has been traced for a new group."""
        if self._traces and self._extended.group.session.rank == 0:
            say(
                "tfdist: the steps use the number of workers or a rank, so they were traced anew "
                f"for the new group: the first one took {time.monotonic() - self._began:.1f} s."
            )
        self._traces = False
