"""An error ends `fit` on some workers, whose processes go on."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from typing import Any

import keras
import tensorflow as tf

import tfdist
from tests.recovery.behaviours.surviving import make_model
from tests.strategy.behaviours.common import rows

_DATA = rows(50)
_STEPS = 7
_WAIT_SECONDS = 120
_ERRORS = {"ValueError": ValueError, "KeyboardInterrupt": KeyboardInterrupt}


class _Raises(keras.callbacks.Callback):
    def __init__(self, step: int, error: str, late: float) -> None:
        super().__init__()
        self._left, self._error, self._late = step, error, late

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._left -= 1
        if self._left == 0:
            time.sleep(self._late)
            raise _ERRORS[self._error]("the disk is gone")


class _DiesAfter(keras.callbacks.Callback):
    def __init__(self, sign: pathlib.Path) -> None:
        super().__init__()
        self._sign = sign

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._sign.exists():
            os.kill(os.getpid(), signal.SIGKILL)


def trained(strategy: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Trains, on some workers up to an error, and once more.

    Args:
        strategy: as for all behaviours.
        settings: folder: for signs between the workers; raisers: the ranks on which an error ends
            the first call; error: its type; late: for how many seconds the last of them waits
            before; dies: the rank of a worker that is killed as soon as that has happened.
    """
    raisers = settings.get("raisers", []) if strategy else []
    me, size = (tfdist.rank(), tfdist.size()) if strategy else (0, 1)
    folder = pathlib.Path(settings.get("folder", "."))
    model = make_model(strategy, {})
    callbacks: list[Any] = [tfdist.callbacks.Elastic()] if strategy else []
    common = len(raisers) == size or (not strategy and settings["common"])
    if me in raisers or common:
        late = settings.get("late", 0.0) if raisers and me == raisers[-1] else 0.0
        callbacks.append(_Raises(5, settings.get("error", "ValueError"), late))
    elif me == settings.get("dies"):
        callbacks.append(_DiesAfter(folder / "raised"))
    try:
        _fit(model, callbacks, 2)
    except tuple(_ERRORS.values()) as error:
        (folder / "raised").touch()
        raised = repr(error)
    else:
        raised = ""
        (folder / f"{me} done").touch()
    if raised and not common:
        _await_others(folder, size, {*raisers, settings.get("dies")})
    failure = ""
    try:
        _fit(model, callbacks[: bool(strategy)], 1)
    except tfdist.errors.TfdistError as error:
        failure = f"{type(error).__name__}: {error}"
    return {
        "weights": model.get_weights(),
        "raised": raised,
        "failure": failure,
        "size": tfdist.size() if strategy else 1,
    }


def _fit(model: keras.Model, callbacks: list[Any], epochs: int) -> None:
    data = tf.data.Dataset.from_tensor_slices(_DATA).batch(8)
    model.fit(data, epochs=epochs, verbose=0, callbacks=callbacks)


def _await_others(folder: pathlib.Path, size: int, gone: set[Any]) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS
    while not all((folder / f"{rank} done").exists() for rank in set(range(size)) - gone):
        assert time.monotonic() < deadline
        time.sleep(0.1)
