"""Trainings whose state is also in what Keras does not list among a model's variables."""

from __future__ import annotations

import contextlib
import pathlib

import keras
import tensorflow as tf

import tfdist
from tests.callbacks.resuming import EPOCHS, Interrupt, Interruption, digest
from tests.strategy.behaviours.common import rows


class TwoOptimizers(keras.Model):
    """Each layer has an optimizer, and a bias grows with the steps."""

    def __init__(self, counts):
        super().__init__()
        self.first, self.second = keras.layers.Dense(8, "relu"), keras.layers.Dense(1)
        self.mean = keras.metrics.Mean(name="loss")
        self.steps = {"counted": [tf.Variable(0.0, trainable=False)]} if counts else {}
        make = keras.optimizers.SGD if counts else keras.optimizers.Adam
        self.makers = [make(0.02), keras.optimizers.SGD(0.02, 0.0 if counts else 0.9)]

    def call(self, inputs):
        return self.second(self.first(inputs))

    def train_step(self, data):
        x, y = data
        layers = self.first, self.second
        with tf.GradientTape(persistent=True) as tape:
            loss = keras.ops.mean(
                (self(x, training=True)[:, 0] - keras.ops.cast(y, "float32")) ** 2
            )
        for optimizer, layer in zip(self.makers, layers, strict=True):
            weights = layer.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
        for (count,) in self.steps.values():
            count.assign_add(1.0)
            self.second.bias.assign_add(0.001 * tf.ones(1) * count)
        self.mean.update_state(loss)
        return {"loss": self.mean.result()}


def resume(strategy, kind, folder):
    """What an undisturbed training ends with, and an interrupted and resumed one."""
    whole = train(strategy, kind, pathlib.Path(folder) / "whole", None)
    with contextlib.suppress(Interruption):
        train(strategy, kind, pathlib.Path(folder) / "part", 5)
    return whole, train(strategy, kind, pathlib.Path(folder) / "part", None)


def train(strategy, kind, folder, at):
    keras.utils.set_random_seed(1)
    x, y = rows(40, 6)
    with strategy.scope():
        if kind == "stateful":
            x, y = x.reshape(20, 2, 6), y[:20]
            layers = [keras.layers.GRU(4, stateful=True), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input([2, 6], batch_size=5), *layers])
            model.compile("adam", "mse")
        else:
            model = TwoOptimizers(kind == "a tf.Variable")
            model(x[:1])
            model.compile()
            for optimizer, layer in zip(model.makers, (model.first, model.second), strict=True):
                optimizer.build(layer.trainable_variables)
    callbacks = [tfdist.callbacks.BackupAndRestore(folder, save_every=2)]
    callbacks += [] if at is None else [Interrupt(at)]
    size = 5 if kind == "stateful" else 10
    try:
        history = model.fit(
            x, y, batch_size=size, epochs=EPOCHS, shuffle=False, callbacks=callbacks, verbose=0
        )
    finally:
        callbacks[0]._series.wait()  # As a process that ends does.
    return digest(model.variables), history.history["loss"]
