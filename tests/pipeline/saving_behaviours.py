"""What ranks do in the tests of saving, and one process in their stead."""

from __future__ import annotations

import contextlib
import os

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.pipeline import layers
from tests.pipeline.zoo import ZOO
from tfdist._src.internals.variables import has_value

ROWS, BATCH = 20, 10
CUSTOM = {name: getattr(layers, name) for name in ("Block", "Penalised", "Positions", "TiedHead")}


def train_and_save(strategy, name, folder, optimizer="adam", pipeline=2):
    """Trains a model, saves it in all ways, and goes on."""
    example = ZOO[name]
    model = _make(strategy, example.build, pipeline)
    _compile(model, example, optimizer)
    x, y = example.batch(ROWS)
    _fit(model, x, y)
    model.save(os.path.join(folder, "model.keras"))
    model.save_weights(os.path.join(folder, "model.weights.h5"))
    return _results(model, x, y)


def load(strategy, name, folder, optimizer="adam", pipeline=2):
    """Loads what was saved, and goes on."""
    example = ZOO[name]
    path = os.path.join(folder, "model.keras")

    def read():
        return keras.models.load_model(path, custom_objects=CUSTOM)

    model = _make(strategy, read, pipeline)
    if strategy is not None:
        _compile(model, example, optimizer)
        model.load_optimizer(path)
    return _results(model, *example.batch(ROWS))


def load_weights(strategy, name, folder, pipeline=2):
    """Loads the files of weights into a new model, and gives its predictions and weights."""
    example = ZOO[name]
    x, _ = example.batch(ROWS)
    found = []
    for file in ("model.weights.h5", "model.keras"):
        model = _make(strategy, example.build, pipeline)
        model.set_weights([np.zeros(w.shape, w.dtype) for w in model.get_weights()])
        model.load_weights(os.path.join(folder, file))
        found.append({"predictions": model.predict(x, verbose=0), **_held(model)})
    return found


def export(strategy, name, folder, pipeline=2):
    """Exports a model and calls what was written."""
    example = ZOO[name]
    model = _make(strategy, example.build, pipeline)
    path = os.path.join(folder, "exported")
    model.export(path, verbose=False)
    x, _ = example.batch(ROWS)
    loaded = tf.saved_model.load(path)
    served = loaded.serve(x).numpy()
    return {"served": served, "predictions": model.predict(x, verbose=0), **_held(model)}


def describe(strategy, name):
    """What a model tells about itself."""
    model = _make(strategy, ZOO[name].build)
    lines = []
    model.summary(print_fn=lambda text, **kwargs: lines.append(text))
    return {"count": model.count_params(), "text": "\n".join(lines)}


def callbacks(strategy, name, folder):
    """Trains with Keras's callbacks that save and load, stops, and goes on from the backup."""
    example = ZOO[name]
    x, y = example.batch(ROWS)
    model = _make(strategy, example.build)
    _compile(model, example)
    stop = keras.callbacks.EarlyStopping(
        "loss", patience=0, min_delta=100.0, restore_best_weights=True
    )
    checkpoints = [
        keras.callbacks.ModelCheckpoint(
            os.path.join(folder, "{epoch}" + ending), save_weights_only="weights" in ending
        )
        for ending in (".keras", ".weights.h5")
    ]
    _fit(model, x, y, epochs=3, callbacks=[stop, *checkpoints])
    best = model.get_weights()
    of_first = keras.models.load_model(os.path.join(folder, "1.keras"), custom_objects=CUSTOM)
    restored = all(map(np.array_equal, best, of_first.get_weights()))
    model.load_weights(os.path.join(folder, "2.weights.h5"))
    changed = not all(map(np.array_equal, model.get_weights(), best))
    return {"restored": restored, "changed": changed, "epochs": stop.stopped_epoch + 1}


def back_up(strategy, name, folder):
    """Fails in the second epoch, and is then run anew."""
    example = ZOO[name]
    x, y = example.batch(ROWS)

    class Fail(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise RuntimeError("stop")

    losses = []
    for others in ([Fail()], []):
        model = _make(strategy, example.build)
        _compile(model, example)
        backup = keras.callbacks.BackupAndRestore(os.path.join(folder, "backup"))
        with contextlib.suppress(RuntimeError):
            history = _fit(model, x, y, epochs=2, callbacks=[backup, *others])
            losses.append(history.history["loss"])
    return {
        "losses": losses,
        "predictions": model.predict(x, verbose=0),
        "weights": dict(enumerate(model.get_weights())),
        **_held(model),
    }


def mistakes(strategy, folder):
    """The messages of errors."""
    model = _make(strategy, ZOO["mlp"].build)
    path = os.path.join(folder, "model.keras")
    messages = []

    def note(function, *args):
        try:
            function(*args)
        except ValueError as error:
            messages.append(str(error))

    before = model.get_weights()
    note(model.load_optimizer, path)
    _compile(model, ZOO["mlp"], "sgd")
    note(model.load_optimizer, path)
    note(model.set_weights, before[:-1])
    note(model.set_weights, [w.T for w in before])
    note(_make(strategy, ZOO["residual_cnn"].build).load_weights, path)
    return messages, all(map(np.array_equal, before, model.get_weights()))


def _make(strategy, build, pipeline=2):
    if strategy is None:
        return build()
    strategy = tfdist.HybridStrategy(pipeline_size=pipeline, microbatches=1)
    with strategy.scope():
        return tfdist.PipelineModel(build, balance="parameters")


def _compile(model, example, optimizer="adam"):
    scope = contextlib.nullcontext()
    if isinstance(model, tfdist.PipelineModel):
        scope = model.distribute_strategy.scope()
    with scope:
        made = keras.optimizers.get(optimizer)
        made.learning_rate = 0.01
        if example.policy == "mixed_float16":
            # A loaded model does not know that it was made under this policy.
            made = keras.optimizers.LossScaleOptimizer(
                made, initial_scale=8.0, dynamic_growth_steps=1
            )
        model.compile(made, example.loss, metrics=["accuracy"])


def _fit(model, x, y, epochs=1, **kwargs):
    return model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, **kwargs)


def _results(model, x, y):
    """What it is now, and after another epoch."""
    evaluation = model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
    predictions = model.predict(x, batch_size=BATCH, verbose=0)
    history = _fit(model, x, y)
    return {
        "evaluation": evaluation,
        "predictions": predictions,
        "loss": history.history["loss"],
        "weights": dict(enumerate(model.get_weights())),
        "scale": _scale(model.optimizer),
        **_held(model),
    }


def _scale(optimizer):
    scale = getattr(optimizer, "dynamic_scale", 1.0)
    return float(scale.numpy() if hasattr(scale, "numpy") else scale)


def _held(model):
    """How many of the whole model's variables have values here."""
    if not isinstance(model, tfdist.PipelineModel):
        return {}
    return {"held": sum(map(has_value, model.partition.graph.model.variables))}


def save_apart(strategy, folder):
    """What each rank reads of the files that it has saved into its own folder, and predicts."""
    model = _trained(strategy)
    own = os.path.join(folder, str(strategy.extended.group.topology.rank))
    os.makedirs(own)
    x, _ = ZOO["mlp"].batch(ROWS)
    read = []
    for file in ("a.keras", "b.h5"):
        model.save(os.path.join(own, file))
        loaded = keras.models.load_model(os.path.join(own, file), compile=False)
        read.append(loaded.predict(x, verbose=0))
    model.save_weights(os.path.join(own, "c.weights.h5"))
    loaded.set_weights([np.zeros(w.shape, w.dtype) for w in loaded.get_weights()])
    loaded.load_weights(os.path.join(own, "c.weights.h5"))
    read.append(loaded.predict(x, verbose=0))
    model.export(os.path.join(own, "d"), verbose=False)
    exported = tf.saved_model.load(os.path.join(own, "d"))
    read.append(exported.serve(x).numpy())
    return read, model.predict(x, verbose=0)


def restore_apart(strategy, folder):
    """What is said where the chief alone finds the epoch to go on from."""
    path = os.path.join(folder, str(strategy.extended.group.topology.rank))
    for _ in range(2):
        model = _make(strategy, ZOO["mlp"].build)
        _compile(model, ZOO["mlp"], "adam")
        backup = keras.callbacks.BackupAndRestore(path, delete_checkpoint=False)
        try:
            model.fit(*ZOO["mlp"].batch(ROWS), batch_size=BATCH, verbose=0, callbacks=[backup])
        except tfdist.errors.UnsupportedError as error:
            return str(error)
    return ""


def _trained(strategy):
    model = _make(strategy, ZOO["mlp"].build)
    _compile(model, ZOO["mlp"], "adam")
    _fit(model, *ZOO["mlp"].batch(ROWS))
    return model
