"""Trainings that are observed, in some of which one worker is slow."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import time
from pathlib import Path

import keras

import tfdist
from tests.harness.messages import messages_of
from tests.monitoring import faults
from tests.strategy.behaviours.common import (
    batches,
    compile_mlp,
    cross_entropy,
    fit,
    mlp,
    rows,
)
from tfdist._src.callbacks import straggler_monitor, timeline
from tfdist._src.callbacks.straggler_monitor import MeasuredSteps
from tfdist._src.comm import tracing
from tfdist._src.monitoring import chrome_trace
from tfdist._src.snapshots import part_file

CODECS = {
    "int8": tfdist.compression.Int8(),
    "powersgd": tfdist.compression.PowerSGD(),
    "randomk": tfdist.compression.RandomK(),
}


def lines_of(module, train):
    """What a module says to the user during a training."""
    with messages_of(module.__name__.rpartition(".")[2]) as lines:
        train()
    return lines


def straggling(strategy, kind, place, slow_rank, fault="sleeps"):
    """The monitor's lines while a worker takes 100 ms longer in each step."""
    delay = faults.each_time(fault, 0.1)
    model, data, callback = faults.training(strategy, kind, place, slow_rank, delay, steps=20)
    callbacks = [callback, tfdist.callbacks.StragglerMonitor(every=10)]
    return lines_of(straggler_monitor, lambda: fit(model, data, epochs=1, callbacks=callbacks))


def links_counted(strategy, kind):
    """Bytes to other hosts in a training: as the monitor counts them, and over one communicator."""
    model, data, _ = faults.training(strategy, kind, "compute", 0, faults.nothing, steps=40)
    steps = MeasuredSteps(model)

    def counted():
        in_all = sum(one.acknowledged_bytes for one in steps.counts().values())
        return in_all, sum(link.acknowledged_bytes for link in steps.communicator.links())

    model.fit(data.take(1), epochs=1, verbose=0)
    before = counted()
    model.fit(data, epochs=1, verbose=0)
    return [now - then for now, then in zip(counted(), before, strict=True)]


def counted_collectives(strategy, every):
    """By kind, the collectives of a training of 20 batches: without a monitor and with one."""
    counted = []
    for added in ([], [tfdist.callbacks.StragglerMonitor(every=every)]):
        model, data, _ = faults.training(strategy, "fit", "compute", 0, faults.nothing, steps=20)
        before = tracing.read()
        fit(model, data, epochs=2, callbacks=added)
        counted.append(dict(tracing.read().since(before).operations))
    return counted


def bar(strategy):
    """What the terminal shows of a training."""
    model = compile_mlp(strategy)
    logger = tfdist.callbacks.ThroughputLogger(every=2)
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        model.fit(batches(*rows(80), 8), epochs=1, verbose=1, callbacks=[logger])
    return shown.getvalue()


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


def timed(strategy, path, kind):
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
        else:
            made = strategy
            if kind in CODECS:
                policy = tfdist.compression.Policy(CODECS[kind], smallest=1)
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
    return lines_of(chrome_trace, lambda: fit(model, data, epochs=1, callbacks=[board, recorder]))


def timed_with_a_late_worker(strategy, path, kind, place, slow_rank, fault, seconds):
    """Writes a timeline of steps 5 to 8, in which a worker is late."""
    delay = faults.each_time(fault, seconds)
    model, data, callback = faults.training(strategy, kind, place, slow_rank, delay, steps=12)
    # Steps of the timeline begin before the delay.
    fit(model, data, epochs=1, callbacks=[tfdist.callbacks.Timeline(path, (5, 9)), callback])


def not_written(strategy, path):
    """What the user is told where the file cannot be written; training goes on."""
    model = compile_mlp(strategy)
    callback = tfdist.callbacks.Timeline(path, (1, 3))
    return lines_of(
        timeline, lambda: fit(model, batches(*rows(40), 8), epochs=1, callbacks=[callback])
    )


def too_much_to_send(strategy, path, most):
    """What the user is told where the workers record more than they can send, in bytes."""
    timeline.MAX_BYTES, before = most, timeline.MAX_BYTES
    try:
        return not_written(strategy, path)
    finally:
        timeline.MAX_BYTES = before


def killed_while_writing(strategy, path, moment):
    """The signal that ends a process while it replaces a file, in such a call of the system."""

    def end(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        if moment == "write":  # The kernel ends it when it has written a half.
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
        else:
            setattr(part_file.os, moment, end)
        try:
            part_file.write_atomically(Path(path), lambda file: file.write(b"x" * 1_000_000))
        finally:
            os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def too_late(strategy, path):
    model = compile_mlp(strategy)
    callback = tfdist.callbacks.Timeline(path, (100, 110))
    return lines_of(
        timeline, lambda: fit(model, batches(*rows(40), 8), epochs=1, callbacks=[callback])
    )
