"""Trainings in which a worker is late: how, in what, and in which kind of training."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import tfdist
from tests.strategy.behaviours.common import batches, cross_entropy, rows, scope

SIZE = 24  # rows of a batch, for up to four replicas and as many microbatches


def be_stopped(seconds: float) -> None:
    """Is stopped, as by a debugger or a batch system, until another process continues it."""
    waking = f"sleep {seconds}; kill -CONT {os.getpid()}"
    with subprocess.Popen(["sh", "-c", waking]):
        os.kill(os.getpid(), signal.SIGSTOP)


FAULTS = {"sleeps": time.sleep, "is stopped": be_stopped}


class Delayed(keras.layers.Layer):
    """Calls a function in the forward pass."""

    def __init__(self, delay: Callable[[], None]) -> None:
        super().__init__()
        self._delay = delay

    def call(self, x: Any) -> Any:
        # Not with the rows, all of which it would be called with.
        with tf.control_dependencies([x] if tf.is_tensor(x) else []):
            called = tf.numpy_function(self._delay, [], [])
        with tf.control_dependencies([called]):
            return tf.identity(x)


def delayed_data(delay: Callable[[], None], count: int = 400, size: int = 8) -> tf.data.Dataset:
    """Batches, before each of which a function is called."""
    return batches(*rows(count), size).map(lambda x, y: (_after(delay, x), y))


class DelayedSteps(keras.callbacks.Callback):
    """Calls a function before each step."""

    def __init__(self, delay: Callable[[], None]) -> None:
        super().__init__()
        self._delay = delay

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._delay()


def _after(delay: Callable[[], None], x: tf.Tensor) -> tf.Tensor:
    def call(values: Any) -> Any:
        delay()
        return values

    return tf.ensure_shape(tf.numpy_function(call, [x], tf.float32), x.shape)


def nothing() -> None:
    """The delay of a worker in time."""


def each_time(fault: str, seconds: float) -> Callable[[], None]:
    """A worker that is late in each step."""
    return functools.partial(FAULTS[fault], seconds)


class Once:
    """A worker that is late in one step after some others."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait, self._calls = wait, 0

    def __call__(self) -> None:
        self._calls += 1
        if self._calls == 8:
            self._wait()


def training(
    strategy: Any, kind: str, place: str, late: int, delay: Callable[[], None], steps: int
) -> tuple[keras.Model, tf.data.Dataset, keras.callbacks.Callback]:
    """A model, its batches and a callback, in one of which a worker is late.

    Args:
        kind: "fit"; "int8", whose gradients are compressed; or a schedule, with a stage per worker.
        place: where it is late: in the forward pass ("compute"), the "input" or the "callback".
        late: its rank.
        delay: what it does there, in each step; in a pipeline's stage for each microbatch.
        steps: the number of batches.
    """
    delays = {place: delay if tfdist.rank() == late else nothing}
    data = delayed_data(delays.get("input", nothing), steps * SIZE, SIZE)
    callback = DelayedSteps(delays.get("callback", nothing))
    layer = functools.partial(Delayed, delays.get("compute", nothing))
    if kind in ("fit", "int8"):
        if kind == "int8":
            policy = tfdist.compression.Policy(tfdist.compression.Int8(), smallest=1)
            strategy = tfdist.MultiWorkerMirroredStrategy(compression=policy)
        with scope(strategy):
            model = keras.Sequential([keras.Input((8,)), layer(), keras.layers.Dense(16)])
            model.add(keras.layers.Dense(3))
            model.compile("adam", cross_entropy())
        return model, data, callback
    with scope(tfdist.PipelineStrategy(microbatches=2, schedule=kind)):
        ends = [f"end_{stage}" for stage in range(tfdist.size())]
        layers = [keras.Input((8,))]
        for stage, end in enumerate(ends):
            layers += [layer() if stage == late else Delayed(nothing)]
            layers += [keras.layers.Dense(8, name=end)]
        layers.append(keras.layers.Dense(3))
        model = tfdist.PipelineModel(keras.Sequential(layers), cuts=ends[:-1])
        model.compile("adam", cross_entropy())
    return model, data, callback
