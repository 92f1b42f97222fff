"""Saving, loading and the callbacks that write, with the same paths on all workers."""

from __future__ import annotations

import contextlib
import csv
import os
import tempfile

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.strategy.behaviours.common import compile_mlp, fit, outcome, rows, scope
from tests.strategy.behaviours.compression import strategy_of


def _chief(strategy):
    return strategy is None or strategy.extended.should_checkpoint


def save_and_load_whole_model(strategy, folder):
    x, y = rows(40)
    model = compile_mlp(strategy, keras.optimizers.Adam)
    fit(model, x, y, batch_size=10)
    path = f"{folder}/model.keras"
    model.save(path)
    alone = keras.models.load_model(path)
    if strategy:
        with strategy.scope():
            again = keras.models.load_model(path)
    else:
        again = keras.models.load_model(path)
    history = fit(again, x, y, batch_size=10)
    same = all(
        np.array_equal(*pair) for pair in zip(model.get_weights(), alone.get_weights(), strict=True)
    )
    return outcome(again, history, same=same, predictions=alone.predict(x, verbose=0))


def save_and_load_weights(strategy, folder):
    x, y = rows(40)
    model = compile_mlp(strategy)
    fit(model, x, y, batch_size=10)
    path = f"{folder}/model.weights.h5"
    model.save_weights(path)
    trained = model.get_weights()
    fit(model, x, y, batch_size=10)
    model.load_weights(path)
    same = all(np.array_equal(*pair) for pair in zip(trained, model.get_weights(), strict=True))
    return outcome(model, same=same)


def save_in_the_old_format(strategy, folder):
    x, y = rows(40)
    model = compile_mlp(strategy)
    fit(model, x, y, batch_size=10)
    path = f"{folder}/model.h5"
    model.save(path)
    return outcome(keras.models.load_model(path, compile=False))


def export_for_serving(strategy, folder):
    x, y = rows(40)
    model = compile_mlp(strategy)
    fit(model, x, y, batch_size=10)
    path = f"{folder}/exported"
    model.export(path, verbose=False)
    if not _chief(strategy):
        return {"served": model.predict(x, verbose=0)}
    predictions = model.predict(x, verbose=0)
    exported = tf.saved_model.load(path)
    served = exported.serve(x)
    np.testing.assert_allclose(served, predictions, atol=1e-6)
    return {"served": np.asarray(served)}


def saved_by_the_chief_alone(strategy, folder):
    """Nothing that one worker does by itself may wait for the others."""
    x, y = rows(40)
    model = compile_mlp(strategy)
    history = fit(model, x, y, batch_size=10)
    if _chief(strategy):
        model.save(f"{folder}/chief.keras")
        keras.models.load_model(f"{folder}/chief.keras")
        model.get_weights()
        model.optimizer.variables[0].numpy()
    return outcome(model, [history, fit(model, x, y, batch_size=10)])


def metrics_read_by_the_chief_alone(strategy, folder):
    read = []

    class Reader(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if _chief(strategy):
                read.append(float(self.model.metrics[0].result()))

        def on_epoch_end(self, epoch, logs=None):
            if _chief(strategy):
                read.append(float(self.model.get_metrics_result()["loss"]))

    x, y = rows(40)
    model = compile_mlp(strategy)
    history = fit(model, x, y, batch_size=10, callbacks=[Reader()])
    return outcome(model, history)


def checkpoint_callback(strategy, folder):
    x, y = rows(40)
    model = compile_mlp(strategy)
    path = f"{folder}/best-{{epoch}}.keras"
    saved = keras.callbacks.ModelCheckpoint(path, monitor="val_loss", save_best_only=True)
    by_batch = keras.callbacks.ModelCheckpoint(
        f"{folder}/last.weights.h5", save_weights_only=True, save_freq=2
    )
    fit(model, x, y, batch_size=10, epochs=3, validation_data=(x, y), callbacks=[saved, by_batch])
    best = keras.models.load_model(path.format(epoch=3))
    return outcome(model, files=sorted(os.listdir(folder)), best=best.get_weights())


def backup_and_restore(strategy, folder):
    x, y = rows(40)

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    def backup():
        return keras.callbacks.BackupAndRestore(f"{folder}/backup", delete_checkpoint=True)

    first = compile_mlp(strategy, keras.optimizers.Adam)
    try:
        fit(first, x, y, batch_size=10, epochs=4, shuffle=False, callbacks=[backup(), Interrupt()])
    except KeyboardInterrupt:
        pass
    second = compile_mlp(strategy, keras.optimizers.Adam)
    history = second.fit(
        x, y, batch_size=10, epochs=4, shuffle=False, verbose=0, callbacks=[backup()]
    )
    return outcome(second, dict(history.history), epochs=list(history.epoch))


def backup_within_an_epoch(strategy, folder):
    x, y = rows(40)

    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 3:
                raise KeyboardInterrupt

    def train(*others):
        model = compile_mlp(strategy, keras.optimizers.Adam)
        backup = keras.callbacks.BackupAndRestore(f"{folder}/backup", save_freq=2)
        settings = {"batch_size": 10, "shuffle": False, "callbacks": [backup, *others]}
        return outcome(model, fit(model, x, y, **settings))

    with contextlib.suppress(KeyboardInterrupt):
        train(Interrupt())
    return train()


def backup_in_own_folders(strategy, behaviour="backup_and_restore"):
    """The path is the same on all workers, but not the folder: only the chief finds its files."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            return globals()[behaviour](strategy, ".")
        finally:
            os.chdir(before)


def backup_in_own_folders_in_the_scope(strategy):
    with scope(strategy):
        return backup_in_own_folders(strategy)


def restored_by_the_chief_alone(strategy, kind="replicated"):
    """What a callback restores on the chief alone counts; or what is said, if it cannot."""
    if strategy and kind == "sharded":
        strategy = tfdist.MultiWorkerMirroredStrategy(shard_optimizer=True)
    if strategy and kind == "compressed":
        strategy = strategy_of("onebit")
    model = compile_mlp(strategy, keras.optimizers.Adam)

    def restore(logs):
        if _chief(strategy):
            model.set_weights([w + 0.5 for w in model.get_weights()])
            model.optimizer.learning_rate = 0.01

    if kind == "compressed":  # Each worker then has errors of its own.
        fit(model, *rows(40), batch_size=10, shuffle=False)
    callbacks = [keras.callbacks.LambdaCallback(on_train_begin=restore)]
    try:
        history = fit(model, *rows(40), batch_size=10, shuffle=False, callbacks=callbacks)
    except tfdist.errors.UnsupportedError as error:
        return str(error)
    return outcome(model, history)


def changed_before(strategy):
    """A difference from before the training, which callbacks do not cause, stays an error."""
    model = compile_mlp(strategy, keras.optimizers.Adam)
    if strategy.extended.worker_rank == 1:
        model.optimizer.learning_rate = 0.5
    try:
        fit(model, *rows(40), batch_size=10)
    except tfdist.errors.ReplicaMismatchError as error:
        return str(error)
    return ""


def csv_logger(strategy, folder):
    x, y = rows(40)
    model = compile_mlp(strategy)
    path = f"{folder}/log.csv"
    history = fit(model, x, y, batch_size=10, epochs=3, callbacks=[keras.callbacks.CSVLogger(path)])
    if _chief(strategy):
        with open(path) as file:
            lines = list(csv.DictReader(file))
        assert [line["epoch"] for line in lines] == ["0", "1", "2"]
        np.testing.assert_allclose([float(line["loss"]) for line in lines], history["loss"])
    return outcome(model, history)


def tensorboard(strategy, folder):
    x, y = rows(40)
    model = compile_mlp(strategy)
    board = keras.callbacks.TensorBoard(f"{folder}/board", histogram_freq=1, write_graph=False)
    fit(model, x, y, batch_size=10, validation_data=(x, y), callbacks=[board])
    logs = tf.io.gfile.glob(f"{folder}/board/*/events*")
    return {"files": len(logs)} if _chief(strategy) else {"files": 2}


def early_stopping_and_plateau(strategy, folder):
    x, y = rows(60)
    model = compile_mlp(strategy, lambda: keras.optimizers.SGD(2.0))
    callbacks = [
        keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, min_delta=0.01),
        keras.callbacks.TerminateOnNaN(),
    ]
    history = model.fit(
        x,
        y,
        batch_size=13,
        epochs=12,
        verbose=0,
        validation_data=rows(20, seed=4),
        callbacks=callbacks,
    )
    return outcome(model, dict(history.history), epochs=list(history.epoch))


def batch_logs(strategy, folder):
    seen = []

    class Collect(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append({k: float(v) for k, v in logs.items()})

    x, y = rows(45)
    model = compile_mlp(strategy)
    fit(model, x, y, batch_size=20, epochs=1, callbacks=[Collect()])
    return outcome(model, seen=seen)


def tf_train_checkpoint(strategy, folder):
    x, y = rows(40)
    model = compile_mlp(strategy, keras.optimizers.Adam)
    fit(model, x, y, batch_size=10)
    own = f"{folder}/{os.getpid()}/ckpt"
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(own)
    trained = model.get_weights()
    fit(model, x, y, batch_size=10)
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).restore(path)
    same = all(np.array_equal(*pair) for pair in zip(trained, model.get_weights(), strict=True))
    return outcome(model, fit(model, x, y, batch_size=10), same=same)
