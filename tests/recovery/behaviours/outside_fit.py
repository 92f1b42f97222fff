"""Workers that are lost between two calls of `fit`: in `evaluate`, in `predict`, or in none."""

from __future__ import annotations

import os
from typing import Any

import keras

import tfdist
from tests.recovery.behaviours.surviving import SIGNALS, make_model
from tests.strategy.behaviours.common import rows

_DATA, _OTHER = rows(50), rows(30, seed=1)
CALLS = {
    "evaluate": lambda model, **given: model.evaluate(*_OTHER, **given),
    "predict": lambda model, **given: model.predict(_OTHER[0], **given),
}


class Ends(keras.callbacks.Callback):
    """This worker ends before a batch of `evaluate` or `predict`.

    Args:
        batch: which one.
        what: how it ends.
    """

    def __init__(self, batch: int, what: str) -> None:
        super().__init__()
        self._batch, self._what = batch, what

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == self._batch:
            end(self._what)

    on_predict_batch_begin = on_test_batch_begin


def end(what: str) -> None:
    """Sends a signal to this process."""
    os.kill(os.getpid(), SIGNALS[what])


def used(
    strategy: Any, first: bool, call: str, fault: tuple[int, int | str, str] | None
) -> dict[str, Any]:
    """Trains, evaluates or predicts, and trains again.

    Args:
        strategy: as given to behaviours.
        first: whether it trains first.
        call: what it does then.
        fault: the rank of the worker that ends; before which batch, or "before" or "after" the
            call; and how it ends.
    """
    model = make_model(strategy, {})
    rank, when, what = fault if strategy and fault else (-1, 0, "")
    mine = bool(strategy) and tfdist.rank() == rank
    if first:
        _fit(model, strategy, 0, 1)
    if mine and when == "before":
        end(what)
    callbacks = [Ends(when, what)] if mine and isinstance(when, int) else []
    failure = ""
    try:
        CALLS[call](model, batch_size=8, verbose=0, callbacks=callbacks)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    if mine and when == "after":
        end(what)
    history = _fit(model, strategy, 1, 3)
    return {
        "weights": model.get_weights(),
        "history": dict(history.history),
        "failure": failure,
        "result": None if failure else CALLS[call](model, batch_size=8, verbose=0),
    }


def _fit(model: keras.Model, strategy: Any, begin: int, end: int) -> Any:
    return model.fit(
        *_DATA,
        batch_size=8,
        initial_epoch=begin,
        epochs=end,
        shuffle=False,
        verbose=0,
        callbacks=[tfdist.callbacks.Elastic()] if strategy else [],
    )
