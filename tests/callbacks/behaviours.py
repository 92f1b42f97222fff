"""Trainings under the audit, some of which go wrong."""

from __future__ import annotations

import keras
import numpy as np

import tfdist
from tests.strategies.behaviours.common import compile_mlp, fit, rows


class Drift(keras.callbacks.Callback):
    """Changes a weight on one worker after some batches."""

    def __init__(self, rank, batch):
        super().__init__()
        self._mine = tfdist.collective.communicator().rank == rank
        self._batch = batch

    def on_train_batch_end(self, batch, logs=None):
        if self._mine and batch == self._batch:
            bias = self.model.layers[1].bias
            bias.assign(bias + 1e-6)


def audited(strategy, every, drift=None):
    model = compile_mlp(strategy, keras.optimizers.Adam)
    callbacks = [tfdist.callbacks.ReplicaAudit(every=every)]
    if drift:
        callbacks.insert(0, Drift(*drift))
    x, y = rows(40)
    try:
        fit(model, x, y, batch_size=4, epochs=1, callbacks=callbacks)
    except tfdist.errors.ReplicaMismatchError as error:
        return str(error)
    return bool(np.isfinite(model.get_weights()[0]).all())


def audited_apart(strategy, shard_optimizer, accumulation):
    """Where workers keep what is theirs alone: a share of the slots, sums until the next update."""
    strategy = tfdist.MultiWorkerMirroredStrategy(shard_optimizer=shard_optimizer)
    model = compile_mlp(
        strategy, lambda: keras.optimizers.Adam(gradient_accumulation_steps=accumulation)
    )
    callbacks = [Drift(1, 3), tfdist.callbacks.ReplicaAudit(every=1)]
    try:
        fit(model, *rows(40), batch_size=4, epochs=1, callbacks=callbacks)
    except tfdist.errors.ReplicaMismatchError as error:
        return str(error)
    return None


def logged(strategy):
    model = compile_mlp(strategy)
    callbacks = [tfdist.callbacks.TrafficLogger()]
    history = fit(model, *rows(40), batch_size=4, epochs=3, callbacks=callbacks)
    return history["sent_bytes"], history["received_bytes"], model.count_params()
