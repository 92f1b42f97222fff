"""Training with compressed gradients that goes on from a file."""

from __future__ import annotations

import os

import keras
import numpy as np
import tensorflow as tf

from tests.harness.messages import messages_of
from tests.strategy.behaviours.common import compile_mlp, fit, rows
from tests.strategy.behaviours.compression import errors_of, strategy_of


def checkpoint(strategy, folder):
    """What is lost is part of a worker's checkpoint, and training goes on as if uninterrupted."""
    x, y = rows(96)
    settings = {"batch_size": 16, "epochs": 1, "shuffle": False}
    whole = compile_mlp(strategy_of("onebit"))
    fit(whole, x, y, **settings)
    path = f"{folder}/{strategy.extended.worker_rank}/checkpoint"
    tf.train.Checkpoint(model=whole, optimizer=whole.optimizer).write(path)
    fit(whole, x, y, **settings)

    again = compile_mlp(strategy_of("onebit"))
    fit(again, x[:16], y[:16], **settings)  # So that all variables exist.
    tf.train.Checkpoint(model=again, optimizer=again.optimizer).read(path).assert_consumed()
    fit(again, x, y, **settings)
    return whole.get_weights(), again.get_weights(), errors_of(whole), errors_of(again)


def checkpoint_of_the_chief(strategy, folder):
    """Who reads the chief's checkpoint does not take the chief's errors for its own."""
    x, y = rows(96)
    model = compile_mlp(strategy_of("onebit"))
    fit(model, x, y, batch_size=16, epochs=1)
    saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = f"{folder}/checkpoint"
    if strategy.extended.worker_rank == 0:
        saved.write(path)
    strategy.extended.group.agree("written", "yes")
    again = compile_mlp(strategy_of("onebit"))
    fit(again, x[:16], y[:16], batch_size=16, epochs=1)
    own = errors_of(again)
    tf.train.Checkpoint(model=again, optimizer=again.optimizer).read(path).expect_partial()
    read = errors_of(again)
    return all(map(np.array_equal, read, own)), all(map(np.array_equal, read, errors_of(model)))


def resumed_from_files(strategy, folder, kind):
    """The same from the chief's file, and what each worker has written beside it."""
    x, y = rows(96)
    settings = {"batch_size": 16, "epochs": 1, "shuffle": False}
    whole = compile_mlp(strategy_of("onebit"))
    fit(whole, x, y, **settings)
    path = f"{folder}/model.{kind}"
    whole.save(path) if kind == "keras" else whole.save_weights(path)
    fit(whole, x, y, **settings)

    chosen = strategy_of("onebit")
    if kind == "keras":
        with chosen.scope():
            again = keras.models.load_model(path)
    else:
        again = compile_mlp(chosen)
        again.optimizer.build(again.trainable_variables)
        again.load_weights(path)
    fit(again, x, y, **settings)
    return whole.get_weights(), again.get_weights(), errors_of(whole), errors_of(again)


def resumed_from_backup(strategy, folder):
    """The same from what Keras's callback has written of a job that was interrupted."""
    x, y = rows(96)
    settings = {"batch_size": 16, "shuffle": False}

    def backup(delete=False):
        return keras.callbacks.BackupAndRestore(f"{folder}/backup", delete_checkpoint=delete)

    whole = compile_mlp(strategy_of("onebit"))
    fit(whole, x, y, epochs=1, callbacks=[backup()], **settings)
    fit(whole, x, y, epochs=1, **settings)
    again = compile_mlp(strategy_of("onebit"))
    fit(again, x, y, epochs=2, callbacks=[backup(delete=True)], **settings)
    strategy.extended.group.agree("deleted", "yes")
    assert not os.path.exists(f"{folder}/backup")
    return whole.get_weights(), again.get_weights(), errors_of(whole), errors_of(again)


def resumed_without(strategy, folder):
    """What each worker says where its part is missing, or belongs to other weights."""
    x, y = rows(96)
    settings = {"batch_size": 16, "epochs": 1, "shuffle": False}
    model = compile_mlp(strategy_of("onebit"))
    fit(model, x, y, **settings)
    model.save_weights(f"{folder}/first.weights.h5")
    fit(model, x, y, **settings)
    model.save_weights(f"{folder}/second.weights.h5")
    part = f"weights.h5.compression-{strategy.extended.worker_rank}-of-2.npz"
    before = errors_of(model)
    os.replace(f"{folder}/second.{part}", f"{folder}/first.{part}")
    with messages_of("compression_files") as said:
        model.load_weights(f"{folder}/first.weights.h5")
        model.load_weights(f"{folder}/second.weights.h5")
    return said, all(map(np.array_equal, errors_of(model), before))
