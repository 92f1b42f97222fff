"""Training with the optimizer's state shared out, in a strategy of its own."""

from __future__ import annotations

import importlib
import os

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.strategy.behaviours.common import (
    compile_mlp,
    cross_entropy,
    fit,
    mlp,
    outcome,
    rows,
    scope,
    sgd_with_momentum,
)
from tfdist._src.sharding import sharded_by


def sharding(strategy, **settings):
    """The strategy; nothing for one process."""
    if strategy is None:
        return None
    return tfdist.MultiWorkerMirroredStrategy(shard_optimizer=True, **settings)


def as_elsewhere(strategy, behaviour, *args):
    """Another module's behaviour."""
    module, name = behaviour.split(":")
    package = __name__.rpartition(".")[0]
    function = getattr(importlib.import_module(f"{package}.{module}"), name)
    with sgd_with_momentum():
        return function(sharding(strategy), *args)


def plain_sgd(strategy, scaled):
    """It keeps nothing: the step is that of a strategy that does not share out."""
    x, y = rows(45)

    def optimizer():
        sgd = keras.optimizers.SGD(0.1, global_clipnorm=0.5)
        return keras.optimizers.LossScaleOptimizer(sgd) if scaled else sgd

    model = compile_mlp(sharding(strategy), optimizer)
    result = outcome(model, fit(model, x, y, batch_size=20))
    assert sharded_by(model.optimizer) is None
    return result


ELEMENTWISE = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.01},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adadelta": {},
    "Adagrad": {},
    "Adamax": {},
    "Nadam": {},
    "Ftrl": {"l1_regularization_strength": 0.01},
    "Lion": {},
}


def by_name(strategy, name):
    x, y = rows(30)
    kind, settings = getattr(keras.optimizers, name), ELEMENTWISE[name]
    model = compile_mlp(sharding(strategy), lambda: kind(0.01, **settings))
    return outcome(model, fit(model, x, y, batch_size=11))


def excluded_from_decay(strategy, by_name):
    x, y = rows(40)
    strategy = sharding(strategy)
    with scope(strategy):
        model = mlp()
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
        names = {"var_names": ["bias"]}
        variables = {"var_list": [model.layers[0].kernel]}
        optimizer.exclude_from_weight_decay(**(names if by_name else variables))
        model.compile(optimizer, cross_entropy())
    return outcome(model, fit(model, x, y, batch_size=10))


def lookups(strategy, name, **settings):
    """A table that is large, of which rows come several times, and cut within a row."""
    generator = np.random.default_rng(0)
    x, y = generator.integers(0, 7, (40, 4)), generator.integers(0, 3, 40)
    with scope(sharding(strategy)):
        model = keras.Sequential(
            [
                keras.Input((4,), dtype="int32"),
                keras.layers.Embedding(7, 5),
                keras.layers.Flatten(),
                keras.layers.Dense(3),
            ]
        )
        optimizer = getattr(keras.optimizers, name)(0.05, **settings)
        model.compile(optimizer, cross_entropy())
    return outcome(model, fit(model, x, y, batch_size=20, epochs=3))


def lookups_clipped(strategy):
    return lookups(strategy, "SGD", momentum=0.9, clipnorm=0.05)


def less_than_workers(strategy):
    """One element, so that workers have none."""
    x, y = rows(40)
    with scope(sharding(strategy)):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        optimizer = keras.optimizers.Nadam(
            0.1, global_clipnorm=0.05, gradient_accumulation_steps=2, use_ema=True
        )
        model.compile(optimizer, "mse")
    history = fit(model, x[:, :1], y.astype("float32"), batch_size=10)
    return outcome(model, history, steps=int(model.optimizer.iterations))


def swapped_averages(strategy):
    x, y = rows(40)
    model = compile_mlp(
        sharding(strategy), lambda: keras.optimizers.SGD(0.5, momentum=0.5, use_ema=True)
    )
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    history = fit(model, x, y, batch_size=10, validation_data=(x, y), callbacks=[swap], epochs=3)
    return outcome(model, history, evaluation=model.evaluate(x, y, verbose=0))


def some_without_gradients(strategy):
    x, y = rows(40)
    x, y = tf.constant(x), tf.constant(y)
    strategy = sharding(strategy)
    with scope(strategy):
        model = mlp()
        optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
        optimizer.build(model.trainable_variables)

    def step(first):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x)))
        chosen = model.trainable_variables[first:]
        gradients = tape.gradient(loss, chosen)
        if strategy is not None:
            gradients = [g / strategy.num_replicas_in_sync for g in gradients]
        optimizer.apply_gradients(zip(gradients, chosen, strict=True))

    for first in (0, 2, 1, 3):
        run = tf.function(lambda first=first: step(first))
        for _ in range(2):
            strategy.run(run) if strategy is not None else run()
    return outcome(model)


def uneven(strategy):
    """The elements of an optimizer's state here and in all, for a table and small variables."""
    strategy = sharding(strategy)
    with scope(strategy):
        model = keras.Sequential([keras.Input((4,), dtype="int32"), keras.layers.Embedding(999, 7)])
        for _ in range(5):
            model.add(keras.layers.Dense(9))
        model.add(keras.layers.Dense(1))
        model.compile(keras.optimizers.Adam(use_ema=True, gradient_accumulation_steps=2), "mse")
        model.optimizer.build(model.trainable_variables)
    own = sum(int(np.prod(v.shape)) for v in model.optimizer.variables)
    fit(model, np.ones((8, 4), "int32"), np.ones((8, 4, 1), "float32"), epochs=1)
    same = own == sum(int(np.prod(v.shape)) for v in model.optimizer.variables)
    return {"own": own, "whole": 4 * model.count_params(), "same": same}


def train_and_save(strategy, folder, kind):
    """Trains, saves in all ways, and goes on."""
    x, y = rows(48)
    model = compile_mlp(sharding(strategy), OPTIMIZERS[kind])
    fit(model, x, y, batch_size=12, shuffle=False)
    model.save(os.path.join(folder, "model.keras"))
    model.save_weights(os.path.join(folder, "model.weights.h5"))
    return outcome(model, fit(model, x, y, batch_size=12, shuffle=False))


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01, use_ema=True),
    "accumulated": lambda: keras.optimizers.SGD(
        0.1, momentum=0.9, gradient_accumulation_steps=3, global_clipnorm=0.5
    ),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01), initial_scale=8.0, dynamic_growth_steps=3
    ),
}


def load_and_go_on(strategy, folder, file, kind, shard=True):
    x, y = rows(48)
    strategy = sharding(strategy) if shard else strategy
    if file == "model.weights.h5":
        model = compile_mlp(strategy, OPTIMIZERS[kind])
        with scope(strategy):
            model.optimizer.build(model.trainable_variables)
        model.load_weights(os.path.join(folder, file))
    else:
        with scope(strategy):
            model = keras.models.load_model(os.path.join(folder, file))
    return outcome(model, fit(model, x, y, batch_size=12, shuffle=False))


def refusals(strategy):
    """What the errors say."""
    messages = []

    def attempt(call):
        try:
            call()
        except (tfdist.errors.UnsupportedError, ValueError) as error:
            messages.append(str(error))
        else:
            messages.append("no error")

    sharded = sharding(strategy)
    for name in ("Lamb", "Adafactor", "Muon"):
        kind = getattr(keras.optimizers, name, keras.optimizers.Lamb)
        attempt(lambda kind=kind: compile_mlp(sharded, kind))
    attempt(lambda: compile_mlp(sharded, WholeSign))
    attempt(lambda: compile_mlp(sharded, ElementwiseSign))
    model = compile_mlp(sharded, keras.optimizers.Adam)
    model.optimizer.build(model.trainable_variables)
    gradients = [tf.zeros(v.shape) for v in model.trainable_variables]
    attempt(lambda: model.optimizer.apply(gradients, model.trainable_variables))
    return messages


class WholeSign(keras.optimizers.SGD):
    """Not known to treat each element by itself."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, tf.sign(gradient) * learning_rate)


class ElementwiseSign(WholeSign):
    """Says that it does."""

    elementwise = True


def own_optimizer(strategy):
    x, y = rows(40)
    model = compile_mlp(sharding(strategy), lambda: ElementwiseSign(0.01))
    return outcome(model, fit(model, x, y, batch_size=10))


def disagreement(strategy):
    shard = strategy.extended.worker_rank == 1
    try:
        tfdist.MultiWorkerMirroredStrategy(shard_optimizer=shard)
    except tfdist.errors.ProgramMismatchError as error:
        return str(error)
    return "no error"


def refusal(strategy):
    try:
        sharding(strategy)
    except tfdist.errors.UnsupportedError as error:
        return str(error)
    return "no error"


def compressed(strategy, shard):
    x, y = rows(96)
    strategy = tfdist.MultiWorkerMirroredStrategy(
        shard_optimizer=shard,
        compression=tfdist.compression.Policy(
            tfdist.compression.Int8(), smallest=0, within_hosts=True
        ),
    )
    model = compile_mlp(strategy, lambda: keras.optimizers.SGD(0.1, momentum=0.9))
    return outcome(model, fit(model, x, y, batch_size=16, epochs=3))
