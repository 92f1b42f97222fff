"""What one worker does wrong, and what the others see; each ends its group."""

from __future__ import annotations

import os
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.strategy.behaviours.common import compile_mlp, cross_entropy, fit, rows


def fit_until(strategy, fault):
    """Trains; worker 1 does `fault` after the third batch. Returns the others' error."""

    class Fault(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2 and strategy.extended.worker_rank == 1:
                if fault == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if fault == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if fault == "ended":
                    strategy.extended.group.close()
                    # It goes on, so that nobody can tell by the end of the process.
                    time.sleep(600)

    x, y = rows(400)
    model = compile_mlp(strategy)
    try:
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[Fault()])
    except tf.errors.UnavailableError as error:
        return str(error)
    return "no error"


def different_models(strategy):
    with strategy.scope():
        units = 3 + strategy.extended.worker_rank
        return message(lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(units)]))


def waits_that_cross(strategy, in_collective):
    """One worker gathers while the other one begins to train."""
    model = compile_mlp(strategy)
    if strategy.extended.worker_rank == in_collective:
        return message(lambda: tfdist.collective.all_gather(tf.zeros([3])))
    return message(lambda: fit(model, *rows(16)))


def another_member(strategy):
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": ["127.0.0.1:1", "127.0.0.1:2"]}),
        task_type="worker",
        task_id=0,
    )
    return message(lambda: tfdist.MultiWorkerMirroredStrategy(resolver))


def not_batched(strategy):
    dataset = tf.data.Dataset.from_tensor_slices(rows(16))
    model = compile_mlp(strategy)
    return message(lambda: fit(model, dataset))


def wrong_arguments(strategy):
    return [
        message(lambda: tfdist.MultiWorkerMirroredStrategy(communication="smoke")),
    ]


def native_wanted(strategy):
    return message(lambda: tfdist.MultiWorkerMirroredStrategy(communication="native"))


def made_again(strategy):
    """A second strategy in the same process trains like the first."""
    again = tfdist.MultiWorkerMirroredStrategy()
    trained = []
    for one in (strategy, again):
        model = compile_mlp(one)
        history = fit(model, *rows(20), batch_size=10)
        trained.append((history["loss"], model.get_weights()))
    return trained


def message(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"no error {sys.version_info.major}"


def layers_outside_of_the_scope(strategy):
    base = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    with strategy.scope():
        model = keras.Sequential([base, keras.layers.Dense(3)])
        model.compile("sgd", cross_entropy())
    return message(lambda: fit(model, *rows(16)))


def optimizer_outside_of_the_scope(strategy):
    optimizer = keras.optimizers.Adam()
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    return message(lambda: model.compile(optimizer, cross_entropy()))


def model_outside_of_the_scope(strategy):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    model.compile("sgd", cross_entropy())
    return message(lambda: fit(model, *rows(16)))


def different_epochs(strategy):
    model = compile_mlp(strategy)
    return message(lambda: fit(model, *rows(16), epochs=2 + strategy.extended.worker_rank))


def the_chief_evaluates(strategy):
    model = compile_mlp(strategy)
    x, y = rows(16)
    if strategy.extended.should_checkpoint:
        return message(lambda: model.evaluate(x, y, verbose=0))
    return message(lambda: model.predict(x, verbose=0))


def different_seeds(strategy):
    """Workers with other random states shuffle alike, and draw data of their own."""
    rank = strategy.extended.worker_rank
    model = compile_mlp(strategy)
    keras.utils.set_random_seed(3 + rank)
    losses = fit(model, *rows(24), batch_size=4, epochs=2)["loss"]
    weights = model.get_weights()
    keras.utils.set_random_seed(3 + rank)
    drawn = np.random.normal(size=(24, 8)).astype("float32")
    return losses, weights, message(lambda: fit(model, drawn, rows(24)[1]))


def different_steps(strategy):
    """Worker 1 does not train the first layer."""
    model = compile_mlp(strategy)
    model.layers[0].trainable = strategy.extended.worker_rank == 0
    return message(lambda: fit(model, *rows(16)))
