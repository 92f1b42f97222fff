"""Measures as many steps as it is told to, and stops the process in between."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import keras

from benchmarks.compression.turn import Turn


class Meter(keras.callbacks.Callback):
    """A worker's end of the driver's pipe: numbers of steps come in, turns go out.

    Args:
        pipe: to the driver.
        count_bytes: gives the bytes that have been sent so far.
        find_loss: gives the model's loss; its time is not counted.
        find_chosen: gives the name of the codec that compresses.
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
        float(logs["loss"])  # There when the step is done.
        seconds = time.perf_counter() - self._start
        sent = self._count_bytes() - self._before
        self._pipe.send(Turn(seconds, sent, self._find_loss(), self._find_chosen()))
        self._await_order()

    def _await_order(self) -> None:
        self._left = self._pipe.recv()
        self._before = self._count_bytes()
        self._start = time.perf_counter()
