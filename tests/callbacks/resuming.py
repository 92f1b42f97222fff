"""Trainings that are interrupted and resumed, and the same ones undisturbed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import pathlib
import stat
import time
from unittest import mock

import keras
import numpy as np

import tfdist
from tests.callbacks.data_kinds import DATA, ROWS, seeded_dataset, validation_of
from tests.strategy.behaviours.common import rows
from tfdist._src.snapshots import part_file

EPOCHS = 3


class Interruption(Exception):
    """Ends a training, on all workers at once."""


class Interrupt(keras.callbacks.Callback):
    """Raises after some batches, or when an epoch is validated."""

    def __init__(self, at):
        super().__init__()
        self._at, self._batches = at, 0

    def on_train_batch_end(self, batch, logs=None):
        self._batches += 1
        if self._batches == self._at:
            raise Interruption

    def on_test_begin(self, logs=None):
        if self._at == "validation" and self._batches >= 2 * 6:
            raise Interruption


class Own(keras.callbacks.Callback):
    """Remembers the epochs' losses in a way of its own."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def on_epoch_end(self, epoch, logs=None):
        self.losses.append(float(logs["loss"]))

    def state_dict(self):
        return {"losses": self.losses}

    def load_state_dict(self, state):
        self.losses = state["losses"]


def dense(strategy, optimizer="adam", policy=None, **compiled):
    def build():
        return keras.Sequential(
            [
                keras.Input([6]),
                keras.layers.Dense(8, "relu", dtype=policy),
                keras.layers.BatchNormalization(synchronized=True),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(1, dtype="float32"),
            ]
        )

    def in_stages():
        return keras.Sequential(
            [
                keras.Input([6]),
                *(keras.layers.Dense(8, "relu") for _ in range(3)),
                keras.layers.Dense(1),
            ]
        )

    with strategy.scope():
        if isinstance(strategy, tfdist.HybridStrategy):
            model = tfdist.PipelineModel(in_stages, balance="parameters")
        else:
            model = build()
        optimizer = OPTIMIZERS[optimizer]()
        model.compile(optimizer, "mse", metrics=["mae"], **compiled)
    return model


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.02),
    "accumulation": lambda: keras.optimizers.Adam(0.02, gradient_accumulation_steps=4),
    "ema": lambda: keras.optimizers.SGD(0.02, 0.9, use_ema=True, ema_overwrite_frequency=5),
    "loss scaling": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.02), initial_scale=1024.0, dynamic_growth_steps=3
    ),
    "scaled accumulation": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.02, gradient_accumulation_steps=3), initial_scale=1024.0
    ),
    "schedule": lambda: keras.optimizers.AdamW(
        keras.optimizers.schedules.CosineDecay(0.02, 15), clipnorm=1.0
    ),
}


def with_strategy(strategy, kind):
    if kind == "sharded":
        return tfdist.MultiWorkerMirroredStrategy(shard_optimizer=True)
    if kind == "pipeline":
        return tfdist.PipelineStrategy(microbatches=2)
    if kind == "hybrid":
        return tfdist.HybridStrategy(pipeline_size=2, microbatches=2)
    if kind == "sharded hybrid":
        return tfdist.HybridStrategy(pipeline_size=2, microbatches=2, shard_optimizer=True)
    if kind in ("int8", "topk", "powersgd"):
        return tfdist.MultiWorkerMirroredStrategy(compression=kind)
    return strategy


def callbacks_of(folder):
    return [
        keras.callbacks.CSVLogger(folder / "log.csv"),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        keras.callbacks.EarlyStopping("loss", patience=5, restore_best_weights=True),
        keras.callbacks.ModelCheckpoint(folder / "best.keras", "val_loss", save_best_only=True),
        Own(),
    ]


def train(
    strategy,
    folder,
    data,
    at=None,
    every=4,
    rated=True,
    begins=0,
    validation="held out",
    distributes=False,
    **model,
):
    """One call of `fit` in what might be a new process; returns all that has come of it."""
    folder = pathlib.Path(folder)
    keras.utils.set_random_seed(1)
    trained = dense(strategy, **model)
    x, y = rows(ROWS, 6)
    arguments = DATA[data](x, y)
    held_out = validation_of(validation, arguments, x, y)
    if distributes:
        arguments["x"] = strategy.experimental_distribute_dataset(arguments["x"])
    callbacks = [
        tfdist.callbacks.BackupAndRestore(folder / "snapshots", save_every=every),
        *callbacks_of(folder),
    ]
    if not rated:  # Schedules set the rate by themselves.
        callbacks = [
            c for c in callbacks if not isinstance(c, keras.callbacks.LearningRateScheduler)
        ]
    if at is not None:
        callbacks.append(Interrupt(at))
    try:
        history = trained.fit(
            **arguments,
            **held_out,
            epochs=EPOCHS,
            initial_epoch=begins,
            callbacks=callbacks,
            verbose=0,
        )
    except Interruption:
        callbacks[0]._series.wait()  # As a process that ends does.
        return None
    own = next(c for c in callbacks if isinstance(c, Own))
    csv = folder / "log.csv"
    return {
        "weights": digest(trained.variables),
        "optimizer": digest(trained.optimizer.variables),
        "history": {name: list(map(float, of)) for name, of in history.history.items()},
        "epochs": history.epoch,
        "own": own.losses,
        "csv": csv.read_text() if tfdist.is_chief() else "",
        "left": sorted(path.name for path in folder.glob("snapshots*")),
    }


def digest(variables):
    """A hash of this worker's values, bit by bit."""
    found = hashlib.sha1()
    for variable in variables:
        for copy in getattr(variable.value, "values", [variable.value]):
            found.update(np.ascontiguousarray(copy.numpy()).tobytes())
    return found.hexdigest()


def resume(strategy, arguments, options):
    """What an undisturbed training returns, and an interrupted and resumed one."""
    kind, folder, data, at, every = arguments
    strategy = with_strategy(strategy, kind)
    undisturbed = train(strategy, f"{folder}/undisturbed", data, every=every, **options)
    assert train(strategy, f"{folder}/interrupted", data, at, every, **options) is None
    return undisturbed, train(strategy, f"{folder}/interrupted", data, every=every, **options)


def stop(strategy, kind, folder, data, at, every, options):
    """Begins a training that is interrupted."""
    strategy = with_strategy(strategy, kind)
    return train(strategy, own_folder(folder), data, at, every, **options)


def go_on(strategy, kind, folder, data, every, options):
    """Goes on with it, or begins anew; returns also what the worker has said."""
    strategy = with_strategy(strategy, kind)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            return train(
                strategy, own_folder(folder), data, every=every, **options
            ), said.getvalue()
        except tfdist.errors.TfdistError as error:
            return f"{type(error).__name__}: {error}", said.getvalue()


def own_folder(folder):
    """The folder, or with a {} in its name, each rank's own."""
    path = pathlib.Path(folder.format(tfdist.rank()))
    path.mkdir(parents=True, exist_ok=True)
    return path


def disk_full(strategy, folder):
    """A training none of whose snapshots can be written, and what is said of it."""

    def fail(*_):
        raise OSError(28, "No space left on device")

    said = io.StringIO()
    with mock.patch.object(part_file.os, "fsync", fail), contextlib.redirect_stderr(said):
        trained = train(strategy, own_folder(folder), "arrays")
    return trained["weights"], said.getvalue()


def full_at_start(strategy, folder):
    """Goes on with a training where nothing can be written, and what is said of it."""

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with mock.patch.object(pathlib.Path, "write_text", fail):
        return go_on(strategy, "plain", folder, "seeded_dataset", 100, {})


def twice(strategy, folder):
    """Two calls of `fit`, the second of which is interrupted; then the script once more."""

    def script(at=None):
        keras.utils.set_random_seed(1)
        model = dense(strategy)
        histories = []
        for name, interrupt in (("one", None), ("two", at)):
            backup = tfdist.callbacks.BackupAndRestore(
                pathlib.Path(folder) / name, save_every=4, delete_checkpoint=False
            )
            callbacks = [backup] if interrupt is None else [backup, Interrupt(interrupt)]
            fitted = model.fit(
                **seeded_dataset(*rows(ROWS, 6)), epochs=2, callbacks=callbacks, verbose=0
            )
            histories.append(fitted.history["loss"])
        return digest(model.variables), histories

    with contextlib.suppress(Interruption):
        script(9)
    resumed = script()
    folder = f"{folder}/undisturbed"
    return resumed, script()


def another_model(strategy, folder):
    """Resumes with a model of other shapes; returns the error."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input([6]), keras.layers.Dense(3), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    backup = tfdist.callbacks.BackupAndRestore(own_folder(folder) / "snapshots")
    try:
        model.fit(*rows(ROWS, 6), callbacks=[backup], verbose=0)
    except tfdist.errors.SnapshotError as error:
        return str(error)
    return None


def refused(strategy, folder):
    """Uses that are refused in `fit`."""
    said = []
    blocked = pathlib.Path(folder) / "file"
    blocked.write_text("")
    with strategy.scope():
        unbuilt = keras.Sequential([keras.layers.Dense(1)])
        unbuilt.compile("adam", "mse")
        lazy = Lazy()
        lazy.compile("adam", "mse")
    for model, path in [(unbuilt, blocked / "snapshots"), (lazy, pathlib.Path(folder) / "a")]:
        try:
            model.fit(*rows(8, 6), callbacks=[tfdist.callbacks.BackupAndRestore(path)], verbose=0)
        except (ValueError, tfdist.errors.UnsupportedError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


class Lazy(keras.Model):
    """Makes its layer in its first step."""

    def __init__(self):
        super().__init__()
        self.layer = None

    def train_step(self, data):
        if self.layer is None:
            self.layer = keras.layers.Dense(1)
        return {"loss": keras.ops.mean(self.layer(data[0]))}


def fails_later(strategy, folder):
    """A training that is interrupted; the disk of worker 1 is full from its third snapshot on."""
    sync, written = part_file.os.fsync, []

    def fail(descriptor):
        if stat.S_ISREG(os.fstat(descriptor).st_mode):  # not a folder
            written.append(descriptor)
        if tfdist.rank() == 1 and len(written) > 2:
            raise OSError(28, "No space left on device")
        sync(descriptor)

    with mock.patch.object(part_file.os, "fsync", fail):
        train(strategy, own_folder(folder), "arrays", at=13, every=2)


def interrupted_in_its_second_call(strategy, folder):
    """Two calls of `fit` with one directory, which the first one has deleted."""
    train(strategy, own_folder(folder), "arrays")
    train(strategy, own_folder(folder), "arrays", at=9)


def one_writes_slowly(strategy, folder):
    """A training on whose worker 1 files take long; what is said of it, and what it leaves."""
    sync, said = part_file.os.fsync, io.StringIO()

    def slowly(descriptor):
        if tfdist.rank() == 1:
            time.sleep(0.3)
        sync(descriptor)

    with mock.patch.object(part_file.os, "fsync", slowly), contextlib.redirect_stderr(said):
        left = train(strategy, own_folder(folder), "arrays", every=1)["left"]
    return said.getvalue(), left
