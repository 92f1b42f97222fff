"""Users' models and callbacks of Keras that write, where hooks of tfdist are installed."""

from __future__ import annotations

import contextlib
import io
import pathlib
from unittest import mock

import keras
import numpy as np
import pytest

from tests.strategy.behaviours.common import compile_mlp, fit, mlp, rows
from tests.strategy.behaviours.faults import message


class _UsersModel(keras.Model):
    """Has attributes of its own whose names tfdist knows."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()
        self.calls = []

    def call(self, x):
        return self.inner(x)

    def full_model(self, *args):
        self.calls.append(args)


def users_names(strategy, folder):
    """A model's `full_model` is not called, and its `optimizer` may be anything."""
    path = pathlib.Path(folder) / "model.weights.h5"
    found = []
    for make in (_UsersModel, lambda: _in_scope(strategy)):
        for optimizer in (None, {"generator": "sgd"}, ["sgd"]):
            model = make()
            if optimizer is not None:
                model.optimizer = optimizer
            x = rows(4)[0]
            model(x)
            model.save_weights(path)
            weights = model.get_weights()
            model.set_weights([np.zeros_like(w) for w in weights])
            model.load_weights(path)
            found.append(all(map(np.array_equal, weights, model.get_weights())))
            found.append(not model.calls)
    return found


def _in_scope(strategy):
    with strategy.scope():
        return _UsersModel()


def progress_bars(strategy):
    """Whether anything is printed by default, and with `verbose`."""
    model = compile_mlp(strategy)
    x, y = rows(16)
    found = []
    for settings in ({}, {"verbose": 2}):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            model.fit(x, y, batch_size=8, **settings)
            model.evaluate(x, y, batch_size=8, **settings)
            model.predict(x, batch_size=8, **settings)
        found.append(bool(printed.getvalue()))
    return found


def errors_of_others(strategy, folder):
    """A folder that cannot be removed is tried once, where no other worker can be the reason."""
    model = compile_mlp(None)
    backup = keras.callbacks.BackupAndRestore(folder)
    backup.set_model(model)
    broken = mock.patch("shutil.rmtree", side_effect=PermissionError("not yours"))
    with broken as removed, pytest.raises(PermissionError):
        backup.on_train_end()
    return removed.call_count


def writing_callbacks(strategy, folder):
    """Who has sent to a monitor and written by Orbax, for which neither has to be installed."""
    sent, written = [], []
    requests = mock.MagicMock()
    requests.post.side_effect = lambda url, *args, **kwargs: sent.append(url)
    requests.exceptions.RequestException = OSError
    callbacks = [keras.callbacks.RemoteMonitor()]
    orbax = mock.MagicMock()
    checkpointer = orbax.training.Checkpointer.return_value
    checkpointer.save_checkpointables.side_effect = lambda step, payload: written.append(step)
    known = hasattr(keras.callbacks, "OrbaxCheckpoint")
    module = "keras.src.callbacks"
    with mock.patch(f"{module}.remote_monitor.requests", requests):
        if not known:
            fit(compile_mlp(strategy), *rows(8), callbacks=callbacks)
            return sent, None
        with mock.patch(f"{module}.orbax_checkpoint.ocp", orbax):
            settings = {"save_on_background": False, "save_weights_only": True}
            callbacks.append(keras.callbacks.OrbaxCheckpoint(folder, **settings))
            fit(compile_mlp(strategy), *rows(8), callbacks=callbacks)
    return sent, written


def orbax_of_a_sharded_optimizer(strategy, folder):
    import tfdist

    if not hasattr(keras.callbacks, "OrbaxCheckpoint"):
        return "UnsupportedError: OrbaxCheckpoint writes"
    sharding = tfdist.MultiWorkerMirroredStrategy(shard_optimizer=True)
    with mock.patch("keras.src.callbacks.orbax_checkpoint.ocp", mock.MagicMock()):
        callback = keras.callbacks.OrbaxCheckpoint(folder)
        model = compile_mlp(sharding, keras.optimizers.Adam)
        return message(lambda: fit(model, *rows(8), callbacks=[callback]))
