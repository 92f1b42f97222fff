"""Trainings that are observed, in some of which one worker is slow."""

from __future__ import annotations

import time

import keras
import tensorflow as tf

import tfdist
from tests.strategies.behaviours.common import (
    batches,
    compile_mlp,
    cross_entropy,
    fit,
    mlp,
    rows,
    scope,
)
from tfdist.callbacks import straggler_monitor, timeline
from tfdist.monitoring import op_profile


class Slow(keras.layers.Layer):
    """Sleeps in the forward pass."""

    def __init__(self, seconds):
        super().__init__()
        self._seconds = seconds

    def call(self, x):
        def sleep(values):
            time.sleep(self._seconds)
            return values

        slept = tf.numpy_function(sleep, [x], tf.float32)
        return x + 0 * tf.stop_gradient(tf.ensure_shape(slept, x.shape))


def slow_model(strategy, seconds):
    with scope(strategy):
        inner = mlp()
        model = keras.Sequential([keras.Input((8,)), Slow(seconds), *inner.layers])
        model.compile("sgd", cross_entropy())
    return model


def slow_data(seconds, count=400, size=8):
    def sleep(x):
        time.sleep(seconds)
        return x

    def load(x, y):
        loaded = tf.numpy_function(sleep, [x], tf.float32)
        return tf.ensure_shape(loaded, [None, 8]), y

    return batches(*rows(count), size).map(load)


def lines_of(module, train):
    """What a module says to the user during a training."""
    said = []
    original, module.say = module.say, said.append
    try:
        train()
    finally:
        module.say = original
    return said


def straggling(strategy, cause, slow_rank, factor=1.3):
    """The monitor's lines while a worker takes 40 ms longer in each step."""
    rank = tfdist.rank()
    extra = 0.04 if rank == slow_rank else 0.0
    model = slow_model(strategy, extra if cause == "compute" else 0.0)
    data = slow_data(extra if cause == "input" else 0.0)
    monitor = tfdist.callbacks.StragglerMonitor(every=20, factor=factor)
    return lines_of(straggler_monitor, lambda: fit(model, data, epochs=1, callbacks=[monitor]))


def straggling_for_a_while(strategy):
    """The monitor's lines where a worker is slow in the first epoch, and another in the second."""
    rank = tfdist.rank()

    class Dawdle(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.slow = epoch < 2 and epoch == rank

        def on_train_batch_begin(self, batch, logs=None):
            if self.slow:
                time.sleep(0.15)

    model = compile_mlp(strategy)
    monitor = tfdist.callbacks.StragglerMonitor(every=30, factor=3.0)
    callbacks = [Dawdle(), monitor]
    data = batches(*rows(240), 8)
    return lines_of(straggler_monitor, lambda: fit(model, data, epochs=4, callbacks=callbacks))


def straggling_stage(strategy, slow_rank):
    strategy = tfdist.PipelineStrategy(microbatches=2)
    with strategy.scope():
        layers = [keras.Input((8,))]
        for stage in range(tfdist.size()):
            slow = Slow(0.03 if stage == slow_rank else 0.0)
            layers += [slow, keras.layers.Dense(8, name=f"end_{stage}")]
        layers.append(keras.layers.Dense(3))
        whole = keras.Sequential(layers)
        cuts = [f"end_{stage}" for stage in range(tfdist.size() - 1)]
        model = tfdist.PipelineModel(whole, cuts=cuts)
        model.compile("sgd", cross_entropy())
    monitor = tfdist.callbacks.StragglerMonitor(every=10)
    data = batches(*rows(160), 8)
    return lines_of(straggler_monitor, lambda: fit(model, data, epochs=1, callbacks=[monitor]))


def logged(strategy, how):
    settings = {"steps_per_execution": 3} if how == "several" else {}
    model = compile_mlp(strategy, run_eagerly=how == "eagerly", **settings)
    if how == "pipeline":
        with tfdist.PipelineStrategy(microbatches=2).scope():
            model = tfdist.PipelineModel(mlp())
            model.compile("sgd", cross_entropy())
    begin = time.perf_counter()
    history = fit(
        model,
        batches(*rows(43), 8),
        epochs=3,
        validation_data=rows(43),
        callbacks=[tfdist.callbacks.ThroughputLogger(every=2)],
    )
    return history, time.perf_counter() - begin


def logged_in_batches(strategy):
    """The batch logs that a callback after it sees, and that the bar shows."""
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(logs.get("rows_per_second"))

    model = compile_mlp(strategy)
    logger = tfdist.callbacks.ThroughputLogger(every=3, tokens_per_row=5)
    history = fit(model, batches(*rows(80), 8), epochs=1, callbacks=[logger, Look()])
    return seen, history


def in_tensorboard(strategy, folder):
    """Writes the figures of epochs and batches for TensorBoard."""
    model = compile_mlp(strategy)
    callbacks = [
        tfdist.callbacks.ThroughputLogger(every=2),
        keras.callbacks.TensorBoard(folder, update_freq="batch"),
    ]
    return fit(model, batches(*rows(80), 8), epochs=2, callbacks=callbacks)


def given_to_one(strategy, name, path):
    """The error on all workers, where only rank 0 has the callback."""
    make = {
        "StragglerMonitor": tfdist.callbacks.StragglerMonitor,
        "Timeline": lambda: tfdist.callbacks.Timeline(path, (0, 1)),
        "ReplicaAudit": tfdist.callbacks.ReplicaAudit,
        "ThroughputLogger": tfdist.callbacks.ThroughputLogger,
        "TrafficLogger": tfdist.callbacks.TrafficLogger,
    }
    model = compile_mlp(strategy)
    callbacks = [make[name]()] if tfdist.rank() == 0 else []
    try:
        fit(model, *rows(16), callbacks=callbacks)
    except tfdist.errors.ProgramMismatchError as error:
        return str(error)
    return ""


def timed(strategy, path, kind, slow_rank=-1):
    """Writes a timeline of steps 5 to 8; returns the weights with it and without."""
    weights = []
    recorder = tfdist.callbacks.Timeline(path, (5, 9), profiler=kind == "profiler")
    for callbacks in ([recorder], []):
        keras.utils.set_random_seed(1)
        if kind in ("1f1b", "zb_h1"):
            pipeline = tfdist.PipelineStrategy(microbatches=4, schedule=kind)
            with pipeline.scope():
                layers = [keras.layers.Dense(8, activation="tanh") for _ in range(6)]
                whole = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(3)])
                model = tfdist.PipelineModel(whole)
                model.compile("adam", cross_entropy())
        elif kind == "slow":
            model = slow_model(strategy, 0.05 if tfdist.rank() == slow_rank else 0.0)
        else:
            made = strategy
            if kind == "int8":
                policy = tfdist.compression.Policy(tfdist.compression.Int8(), smallest=1)
                made = tfdist.MultiWorkerMirroredStrategy(compression=policy)
            several = {"steps_per_execution": 2} if kind == "several" else {}
            model = compile_mlp(made, keras.optimizers.Adam, **several)
        fit(model, batches(*rows(96), 8), epochs=1, callbacks=callbacks)
        weights.append(model.get_weights())
    return weights


def profiled_by_another(strategy, path, folder):
    """What the user is told where TensorBoard uses TensorFlow's profiler."""
    model = compile_mlp(strategy)
    board = keras.callbacks.TensorBoard(folder, profile_batch=(1, 4), write_graph=False)
    recorder = tfdist.callbacks.Timeline(path, (1, 3), profiler=True)
    data = batches(*rows(40), 8)
    return lines_of(op_profile, lambda: fit(model, data, epochs=1, callbacks=[board, recorder]))


def not_written(strategy, path):
    """What the user is told where the file cannot be written; training goes on."""
    model = compile_mlp(strategy)
    callback = tfdist.callbacks.Timeline(path, (1, 3))
    return lines_of(
        timeline, lambda: fit(model, batches(*rows(40), 8), epochs=1, callbacks=[callback])
    )


def too_late(strategy, path):
    model = compile_mlp(strategy)
    callback = tfdist.callbacks.Timeline(path, (100, 110))
    return lines_of(
        timeline, lambda: fit(model, batches(*rows(40), 8), epochs=1, callbacks=[callback])
    )
