"""What one worker does alone, while the others go on."""

from __future__ import annotations

import tempfile
import warnings

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.strategy.behaviours.common import compile_mlp, fit, outcome, rows, scope
from tests.strategy.behaviours.faults import message


def a_teacher(strategy):
    """The chief asks a model that was made outside of the scope, and trains another by itself."""
    x, y = rows(24)
    teacher = compile_mlp(None)
    said = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if strategy is None or strategy.extended.should_checkpoint:
            said["predicted"] = teacher.predict(x, verbose=0)
            said["evaluated"] = teacher.evaluate(x, y, verbose=0)
            said["tested"] = teacher.test_on_batch(x, y)
            student = compile_mlp(tfdist.MirroredStrategy(["CPU:0"]))
            said["history"] = fit(student, x, said["predicted"].argmax(axis=1), shuffle=False)
            said["again"] = student.evaluate(x, y, verbose=0)
            of_tensorflow = compile_mlp(tf.distribute.OneDeviceStrategy("CPU:0"))
            said["one device"] = fit(of_tensorflow, x, y, shuffle=False)
    model = compile_mlp(strategy)
    return outcome(model, fit(model, x, y, shuffle=False)), said


def training_outside_of_the_scope(strategy):
    x, y = rows(16)
    model = compile_mlp(None)
    before = model.get_weights()
    said = [message(lambda: fit(model, x, y)), message(lambda: model.train_on_batch(x, y))]
    return said, all(map(np.array_equal, before, model.get_weights()))


def loading_in_the_scope(strategy):
    """The chief saves and loads weights by itself, inside the scope."""
    x, y = rows(24)
    model = compile_mlp(strategy, keras.optimizers.Adam)
    history = [fit(model, x, y, shuffle=False)]
    if strategy is None or strategy.extended.should_checkpoint:
        with tempfile.TemporaryDirectory() as folder, scope(strategy):
            model.save_weights(f"{folder}/all.weights.h5")
            model.load_weights(f"{folder}/all.weights.h5")
    return outcome(model, [*history, fit(model, x, y, shuffle=False)])


def distributed_by_keras_too(strategy):
    model = compile_mlp(strategy)
    mesh = keras.distribution.DeviceMesh((1,), ["batch"], ["cpu:0"])
    keras.distribution.set_distribution(keras.distribution.DataParallel(device_mesh=mesh))
    try:
        said = [
            message(lambda: fit(model, *rows(16))),
            message(lambda: model.predict(rows(16)[0])),
            message(lambda: model.compile("sgd", "mse")),
        ]
    finally:
        keras.distribution.set_distribution(None)
    return said
