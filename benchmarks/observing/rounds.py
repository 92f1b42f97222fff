"""A callback with which a worker takes steps on request, with the requested way to watch."""

from __future__ import annotations

import contextlib
import ctypes
import time
from pathlib import Path
from typing import Any

import keras

from benchmarks.observing import watchers
from benchmarks.observing.watches import WATCHES
from tfdist._src import native
from tfdist._src.comm.tracing import KINDS
from tfdist._src.native.api import Activity


class Rounds(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that times steps with the way to watch that the driver requests.

    A request of the driver consists of a way to watch and a number of steps. After this many steps,
    the callback sends an answer, and waits for the next request. The answer consists of the time of
    each step in seconds, and the number of inputs and collectives that the recorder has counted in
    these steps.

    All steps belong to one call of `fit`. The training step is traced twice, with and without the
    operations that report to the recorder. If the next request has the same way to watch, the
    callbacks of this way keep their state. Otherwise, they are created again.

    Args:
        pipe: the `multiprocessing` connection to the driver.
        folder: the folder for the files of the callbacks.
    """

    def __init__(self, pipe: Any, folder: Path) -> None:
        super().__init__()
        self._pipe, self._folder = pipe, folder
        self._watch = ""
        self._callbacks: watchers.Callbacks = []
        self._around = contextlib.ExitStack()

    def on_train_begin(self, logs: Any = None) -> None:
        self._recorded = self.model.train_function
        self._unrecorded = self.model.make_train_function(force=True)
        self._await_order()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        for callback in self._callbacks:
            callback.on_train_batch_begin(self._taken, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        for callback in self._callbacks:
            callback.on_train_batch_end(self._taken, logs)
        self._taken += 1
        float(logs["loss"])
        now = time.perf_counter()
        self._times.append(now - self._last)
        self._last = now
        if len(self._times) == self._ordered:
            self._pipe.send([self._times, count() - self._counted])
            self._await_order()

    def _await_order(self) -> None:
        watch, self._ordered = self._pipe.recv()
        if watch != self._watch:
            self._switch(watch)
        self._times: list[float] = []
        self._counted = count()
        self._last = time.perf_counter()

    def _switch(self, watch: str) -> None:
        self._around.close()
        self._watch, self._taken = watch, 0
        recorded = WATCHES[watch].recorded
        self.model.train_function = self._recorded if recorded else self._unrecorded
        self._callbacks, around = watchers.make(watch, self._folder)
        self._around.enter_context(watchers.running(self.model, self._callbacks))
        self._around.enter_context(around())


def count() -> int:
    """Returns the number of inputs and collectives that the recorder has counted so far."""
    activity = Activity()
    native.load().library.tfd_get_activity(ctypes.byref(activity))
    return int(activity.steps) + sum(getattr(activity, kind) for kind in KINDS)
