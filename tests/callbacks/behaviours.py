"""Trainings under the audit, some of which go wrong."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfdist
from tests.strategy.behaviours.common import compile_mlp, fit, outcome, rows


class Drift(keras.callbacks.Callback):
    """Changes a weight on one worker after some batches, behind the back of the strategy."""

    def __init__(self, rank, batch):
        super().__init__()
        self._mine = tfdist.collective.communicator().rank == rank
        self._batch = batch

    def on_train_batch_end(self, batch, logs=None):
        if self._mine and batch == self._batch:
            for copy in self.model.layers[1].bias.value.values:
                copy.assign(copy + 1e-6)


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


def warmed_up(strategy, sharded=False):
    """With a schedule, accumulated gradients, weight decay and several steps per execution."""
    if strategy and sharded:
        strategy = tfdist.MultiWorkerMirroredStrategy(shard_optimizer=True)
    cosine = keras.optimizers.schedules.CosineDecay(0.1, decay_steps=30)
    model = compile_mlp(
        strategy,
        lambda: keras.optimizers.AdamW(cosine, weight_decay=0.1, gradient_accumulation_steps=2),
        steps_per_execution=3,
    )
    callbacks = [tfdist.callbacks.LearningRateWarmup(epochs=1.5, verbose=1)]
    return outcome(model, fit(model, *rows(80), batch_size=10, callbacks=callbacks))


def warmed_up_by_size(strategy, replicas):
    """From the rate that is given to that times the number of replicas, and then without."""
    if strategy:
        assert strategy.num_replicas_in_sync == replicas
        rate, settings = 0.1, {"scale_by_size": True}
    else:
        rate, settings = 0.1 * replicas, {"initial": 1 / replicas}
    model = compile_mlp(strategy, lambda: keras.optimizers.SGD(rate))
    callbacks = [tfdist.callbacks.LearningRateWarmup(steps=5, **settings)]
    history = fit(model, *rows(80), batch_size=10, callbacks=callbacks)
    model.optimizer.learning_rate = 0.1
    return outcome(model, [history, fit(model, *rows(80), batch_size=10)])


def warmed_up_differently(strategy, alone):
    """The error, as each worker has another warmup, or one has none."""
    rank = tfdist.collective.communicator().rank
    model = compile_mlp(strategy)
    warmups = [tfdist.callbacks.LearningRateWarmup(steps=5 + rank)]
    with pytest.raises(tfdist.errors.ProgramMismatchError) as raised:
        fit(model, *rows(8), callbacks=[] if alone and rank else warmups)
    return str(raised.value)
