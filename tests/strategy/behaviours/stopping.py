"""Callbacks that end training early."""

from __future__ import annotations

import keras

from tests.strategy.behaviours.common import compile_mlp, fit, outcome, rows
from tests.strategy.behaviours.faults import message


class _Stop(keras.callbacks.Callback):
    def __init__(self, epoch, batch=None, *, here=True):
        super().__init__()
        self.last = (epoch, batch)
        self.here = here
        self.epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self._stop((self.epoch, batch))

    def on_epoch_end(self, epoch, logs=None):
        self._stop((epoch, None))

    def _stop(self, now):
        if self.here and now == self.last:
            self.model.stop_training = True


def all_stop_within_an_epoch(strategy):
    x, y = rows(40)
    model = compile_mlp(strategy)
    settings = {"batch_size": 8, "epochs": 3, "validation_data": (x, y)}
    return outcome(model, fit(model, x, y, callbacks=[_Stop(1, 2)], **settings))


def one_stops_after_an_epoch(strategy):
    """All do; also where it is after the last batch, or the callbacks come in a list of Keras."""
    x, y = rows(40)
    here = strategy is None or strategy.extended.worker_rank == 1
    model = compile_mlp(strategy)
    epochs = []
    for batch in (None, 4):
        stop = _Stop(1, batch, here=here)
        history = fit(model, x, y, batch_size=8, epochs=5, callbacks=stop, validation_data=(x, y))
        epochs.append(len(history["val_loss"]))
    several = keras.callbacks.CallbackList([_Stop(0, here=here)], add_history=True, model=model)
    epochs.append(len(fit(model, x, y, epochs=5, callbacks=several)["loss"]))
    return outcome(model, history, epochs=epochs)


def one_stops_within_an_epoch(strategy):
    x, y = rows(40)
    model = compile_mlp(strategy)
    stop = _Stop(0, 2, here=strategy.extended.should_checkpoint)
    return message(lambda: fit(model, x, y, batch_size=8, callbacks=[stop]))
