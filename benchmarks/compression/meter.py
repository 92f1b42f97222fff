"""Measures the steps that the driver requests, and lets the worker sleep between requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import keras

from benchmarks.compression.turn import Turn


class Meter(keras.callbacks.Callback):
    """A callback that measures the steps that the driver requests.

    The driver sends a number of steps through the worker's pipe. After this many steps, the
    callback sends a `Turn` with the measurements, and waits for the next number.

    Args:
        pipe: the pipe to the driver.
        count_bytes: a function that returns the number of bytes sent so far.
        find_loss: a function that returns the model's loss. The measured time excludes this
            function.
        find_chosen: a function that returns the name of the codec in use.
    """

    def __init__(
        self,
        pipe: Connection,
        count_bytes: Callable[[], int],
        find_loss: Callable[[], float],
        find_chosen: Callable[[], str],
    ) -> None:
        super().__init__()
        self._pipe = pipe
        self._count_bytes = count_bytes
        self._find_loss = find_loss
        self._find_chosen = find_chosen

    def on_train_begin(self, logs: Any = None) -> None:
        self._await_order()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._left -= 1
        if self._left:
            return
        float(logs["loss"])  # Waits for the end of the step.
        seconds = time.perf_counter() - self._start
        sent = self._count_bytes() - self._before
        self._pipe.send(Turn(seconds, sent, self._find_loss(), self._find_chosen()))
        self._await_order()

    def _await_order(self) -> None:
        self._left = self._pipe.recv()
        self._before = self._count_bytes()
        self._start = time.perf_counter()
