"""Every callback of `keras.callbacks`: its calls, its files, and its effect on `fit`."""

from __future__ import annotations

import contextlib
import csv
import io
import pathlib
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import callbacks as k
from keras import layers

from tests.enumeration.training import (
    BATCH,
    ROWS,
    Program,
    adam,
    integers,
    numbers,
    public_classes,
    shared_folder,
    wait,
)
from tests.strategy.behaviours.common import fit, outcome, scope

Folder = pathlib.Path
# Callbacks, and a function that returns their results after `fit`.
Created = tuple[list[Any], Callable[[], Any]]

HOOKS = [
    f"on_{when}"
    for part in ("train", "test", "predict")
    for when in (f"{part}_begin", f"{part}_end", f"{part}_batch_begin", f"{part}_batch_end")
] + ["on_epoch_begin", "on_epoch_end"]


def _model(**compiled: Any) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(5, activation="tanh", name="hidden"),
            layers.Dropout(0.2, seed=1),
            layers.Dense(3, name="logits"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(**{"optimizer": adam(), "loss": loss, "metrics": ["accuracy"], **compiled})
    return model


def _data(count: int = ROWS, seed: int = 0) -> dict[str, Any]:
    return {"x": numbers(count, 4, seed=seed), "y": integers(3, count, seed=seed)}


def _fit(model: keras.Model, given: Any, **settings: Any) -> dict[str, Any]:
    held_out = _data(9, seed=5)
    settings = {
        "validation_data": (held_out["x"], held_out["y"]),
        "batch_size": BATCH,
        "epochs": 3,
        "shuffle": False,
        **settings,
    }
    return fit(model, **_data(), callbacks=given, **settings)


def _training(
    create: Callable[[Folder], Created],
    compiled: Callable[[], dict[str, Any]] = dict,
    **settings: Any,
) -> Program:
    """Fits, evaluates and predicts with callbacks."""

    def program(strategy: Any) -> dict[str, Any]:
        with shared_folder(strategy) as folder:
            with scope(strategy):
                model = _model(**compiled())
            given, seen = create(folder)
            history = _fit(model, given, **settings)
            data, size = _data(), {"batch_size": BATCH, "verbose": 0}
            tested = model.evaluate(**data, **size, callbacks=given, return_dict=True)
            predicted = model.predict(data["x"], **size, callbacks=given)
            wait(strategy)
            more = {"evaluated": tested, "predicted": predicted, "seen": seen()}
            return outcome(model, history, **more)

    return program


def _acting(*create: Callable[[], Any]) -> Callable[[Folder], Created]:
    """Creates callbacks without results of their own, which only affect the training."""
    return lambda folder: ([make() for make in create], lambda: None)


class Recorder(k.Callback):
    """Records each call with its logs, the learning rate, and the weights after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def set_params(self, params: Any) -> None:
        super().set_params(params)
        self.seen.append({name: params[name] for name in sorted(params)})


def _noting(hook: str) -> Callable[..., None]:
    def note(self: Recorder, *which: Any, logs: Any = None) -> None:
        if which and not isinstance(which[-1], int):
            *which, logs = which
        weights = self.model.get_weights() if hook == "on_train_batch_end" else None
        rate = float(self.model.optimizer.learning_rate)
        logs = {name: np.asarray(value) for name, value in (logs or {}).items()}
        self.seen.append([hook, [int(number) for number in which], logs, rate, weights])

    return note


for _hook in HOOKS:
    setattr(Recorder, _hook, _noting(_hook))


def _recorded(folder: Folder) -> Created:
    recorder = Recorder()
    return [recorder], lambda: recorder.seen


def _with_history(folder: Folder) -> Created:
    recorder = Recorder()
    history = k.History()
    return [recorder, history], lambda: [recorder.seen, history.history, history.epoch]


def _lambdas(folder: Folder) -> Created:
    seen: list[Any] = []
    hooks = {
        hook: lambda *args, hook=hook: seen.append([hook, *args[:-1], dict(args[-1] or {})])
        for hook in ("on_epoch_begin", "on_epoch_end", "on_train_begin", "on_train_end")
    }
    batches: dict[str, Callable[..., None]] = {
        hook: lambda batch, logs, hook=hook: seen.append([hook, batch, dict(logs or {})])
        for hook in ("on_train_batch_begin", "on_train_batch_end")
    }
    return [k.LambdaCallback(**hooks, **batches)], lambda: seen


def _logged(**settings: Any) -> Callable[[Folder], Created]:
    def create(folder: Folder) -> Created:
        file = folder / "log.csv"
        return [k.CSVLogger(file, **settings)], lambda: _table(file, settings.get("separator", ","))

    return create


def _table(file: Folder, separator: str) -> list[dict[str, float]]:
    with open(file, newline="") as opened:
        rows = list(csv.DictReader(opened, delimiter=separator))
    return [{name: float(value) for name, value in row.items()} for row in rows]


def _checkpoints(name: str, **settings: Any) -> Callable[[Folder], Created]:
    """Creates a `ModelCheckpoint`, whose result is the weights in all remaining files."""

    def create(folder: Folder) -> Created:
        return [k.ModelCheckpoint(str(folder / name), **settings)], lambda: _saved(folder)

    return create


def _saved(folder: Folder, **compiled: Any) -> dict[str, Any]:
    found = {}
    for file in sorted(folder.iterdir()):
        if file.name.endswith(".weights.h5"):
            model = _model(**compiled)
            model.optimizer.build(model.trainable_variables)
            model.load_weights(file)
        else:
            model = keras.models.load_model(file)
        name = re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.3f}", file.name)
        found[name] = [model.get_weights(), int(model.optimizer.iterations.numpy())]
    return found


class _Stop(Exception):
    pass


class _StopsAfter(k.Callback):
    def __init__(self, epoch: int, batch: int) -> None:
        super().__init__()
        self._at = (epoch, batch)
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if (self._epoch, batch) == self._at:
            raise _Stop


def _resumed(**settings: Any) -> Program:
    """A training that stops within its second epoch, and is resumed by another call of `fit`."""

    def program(strategy: Any) -> dict[str, Any]:
        with shared_folder(strategy) as folder:
            for stopping in (True, False):
                with scope(strategy):
                    model = _model()
                backup = k.BackupAndRestore(str(folder / "backup"), **settings)
                recorder = Recorder()
                given = [backup, recorder, *([_StopsAfter(1, 1)] if stopping else [])]
                try:
                    history = _fit(model, given)
                except _Stop:
                    wait(strategy)
            wait(strategy)
            left = sorted(file.name for file in folder.rglob("*"))
            return outcome(model, history, seen=recorder.seen, left=left)

    return program


def _averages() -> dict[str, Any]:
    return {"optimizer": keras.optimizers.Adam(0.02, epsilon=1e-3, use_ema=True, ema_momentum=0.6)}


def _averaged(swap: bool) -> Callable[[Folder], Created]:
    def create(folder: Folder) -> Created:
        recorder = Recorder()
        saver = k.ModelCheckpoint(str(folder / "{epoch}.weights.h5"), save_weights_only=True)
        given = [k.SwapEMAWeights(swap_on_epoch=swap), recorder, saver]
        return given, lambda: [recorder.seen, _saved(folder, **_averages())]

    return create


def _board(folder: Folder) -> Created:
    board = k.TensorBoard(
        str(folder / "board"), histogram_freq=1, write_images=True, update_freq="batch"
    )
    return [board], lambda: _events(folder / "board")


def _events(folder: Folder) -> list[Any]:
    """Returns the contents of TensorBoard's files, without times."""
    found = []
    for file in sorted(folder.rglob("*.tfevents.*")):
        part = file.parent.name
        for record in tf.data.TFRecordDataset(str(file)).as_numpy_iterator():
            event = tf.compat.v1.Event.FromString(record)
            if event.HasField("graph_def"):
                found.append([part, "graph", 0, None])
            for value in event.summary.value:
                tensor = tf.make_ndarray(value.tensor)
                if tensor.dtype.kind not in "fiu":
                    tensor = tensor.shape  # Images, and the model as JSON.
                found.append([part, value.tag, event.step, tensor])
    return sorted(found, key=lambda each: (each[0], each[1], each[2]))


def _sent(folder: Folder) -> Created:
    """Creates a `RemoteMonitor`, whose result is the received requests; only the chief sends."""
    file = folder / "sent"
    requests = mock.MagicMock()
    requests.exceptions.RequestException = OSError

    def post(url: str, json: Any, headers: Any) -> None:
        with open(file, "a") as opened:
            opened.write(f"{json['epoch']} {json['loss']:.9f} {json['val_accuracy']:.9f}\n")

    requests.post.side_effect = post
    monitor = k.RemoteMonitor(send_as_json=True)
    send = monitor.on_epoch_end

    def patched(epoch: int, logs: Any = None) -> None:
        with mock.patch("keras.src.callbacks.remote_monitor.requests", requests):
            send(epoch, logs)

    monitor.on_epoch_end = patched
    return [monitor], lambda: [
        [float(number) for number in line.split()] for line in file.read_text().splitlines()
    ]


def _progress(folder: Folder) -> Created:
    """Creates a progress bar, whose result is the losses that it prints."""
    printed = io.StringIO()
    bar = k.ProgbarLogger()
    finish = bar.on_epoch_end

    def patched(epoch: int, logs: Any = None) -> None:
        with contextlib.redirect_stdout(printed):
            finish(epoch, logs)

    bar.on_epoch_end = patched
    return [bar], lambda: [float(x) for x in re.findall(r"loss: (\d+\.\d+)", printed.getvalue())]


def _not_a_number(strategy: Any) -> dict[str, Any]:
    """A loss of NaN in the second batch of the second epoch ends `fit`."""
    with scope(strategy):
        model = _model(metrics=[])
    x = _data()["x"]

    class Spoiled(k.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 0:
                x[-1] = np.nan

    recorder = Recorder()
    dataset = tf.data.Dataset.from_generator(
        lambda: ((x[i : i + BATCH], _data()["y"][i : i + BATCH]) for i in (0, BATCH)),
        output_signature=(
            tf.TensorSpec((None, 4), tf.float32),
            tf.TensorSpec((None,), tf.int32),
        ),
    ).apply(tf.data.experimental.assert_cardinality(2))
    history = fit(model, dataset, epochs=4, callbacks=[Spoiled(), k.TerminateOnNaN(), recorder])
    losses = [note[2]["loss"] for note in recorder.seen[1:] if note[0] == "on_train_batch_end"]
    return outcome(
        _model(metrics=[]),  # The weights of the trained model are NaN.
        finite=[
            np.isfinite(losses).tolist(),
            np.isfinite(history["loss"]).tolist(),
            [np.isfinite(weight).tolist() for weight in model.get_weights()],
        ],
    )


def _whole_list(strategy: Any) -> dict[str, Any]:
    """A `CallbackList` made by the user, with Keras's own history."""
    with scope(strategy):
        model = _model()
    recorder = Recorder()
    given = k.CallbackList([recorder], add_history=True, model=model, epochs=3, verbose=0)
    history = _fit(model, given)
    return outcome(model, history, seen=recorder.seen)


class Unfreezing(k.Callback):
    """Unfreezes a layer that was frozen when the model was compiled."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.model.get_layer("hidden").trainable = True


def _unfrozen(strategy: Any) -> dict[str, Any]:
    with scope(strategy):
        model = _model()
        model.get_layer("hidden").trainable = False
    return outcome(model, _fit(model, [Unfreezing()]))


PROGRAMS: dict[str, Program] = {
    "BackupAndRestore": _resumed(),
    "BackupAndRestore/batches": _resumed(save_freq=1),
    "BackupAndRestore/kept": _resumed(delete_checkpoint=False),
    "CSVLogger": _training(_logged()),
    "CSVLogger/separator": _training(_logged(separator=";", append=True)),
    "Callback": _training(_recorded),
    "Callback/two steps at once": _training(_recorded, lambda: {"steps_per_execution": 2}),
    "Callback/eager": _training(_recorded, lambda: {"run_eagerly": True}),
    "Callback/unfreezes": _unfrozen,
    "Callback/steps": _training(_recorded, steps_per_epoch=1, validation_steps=1, initial_epoch=1),
    "CallbackList": _whole_list,
    "EarlyStopping": _training(_acting(lambda: k.EarlyStopping("loss", min_delta=9.0, patience=1))),
    "EarlyStopping/best weights": _training(
        _acting(
            lambda: k.EarlyStopping(
                "val_loss", min_delta=9.0, patience=1, restore_best_weights=True
            )
        )
    ),
    "EarlyStopping/accuracy": _training(
        _acting(lambda: k.EarlyStopping("accuracy", mode="max", baseline=0.99, start_from_epoch=1))
    ),
    "History": _training(_with_history),
    "LambdaCallback": _training(_lambdas),
    "LearningRateScheduler": _training(
        _acting(lambda: k.LearningRateScheduler(lambda epoch: 0.02 / (1 + epoch)))
    ),
    "LearningRateScheduler/of the rate": _training(
        _acting(lambda: k.LearningRateScheduler(lambda epoch, rate: 0.5 * rate))
    ),
    "ModelCheckpoint": _training(_checkpoints("{epoch}-{val_loss:.3f}.keras")),
    "ModelCheckpoint/weights": _training(
        _checkpoints("{epoch}-{loss:.3f}.weights.h5", save_weights_only=True)
    ),
    "ModelCheckpoint/best": _training(
        _checkpoints("best.keras", save_best_only=True, monitor="loss", mode="max")
    ),
    "ModelCheckpoint/batches": _training(_checkpoints("{epoch}-{batch}.keras", save_freq=3)),
    "ProgbarLogger": _training(_progress),
    "ReduceLROnPlateau": _training(
        _acting(lambda: k.ReduceLROnPlateau("loss", min_delta=9.0, patience=1), Recorder)
    ),
    "ReduceLROnPlateau/cooldown": _training(
        _acting(lambda: k.ReduceLROnPlateau("val_loss", 0.5, 1, min_delta=9.0, cooldown=1)),
        epochs=5,
    ),
    "RemoteMonitor": _training(_sent),
    "SwapEMAWeights": _training(_averaged(False), _averages),
    "SwapEMAWeights/epochs": _training(_averaged(True), _averages),
    "TensorBoard": _training(_board),
    "TerminateOnNaN": _not_a_number,
}

DEFAULT: list[str] = []


def missing() -> set[str]:
    """The public callbacks without a program."""
    known = {name.partition("/")[0] for name in PROGRAMS}
    return set(public_classes(k, k.Callback)) - known
