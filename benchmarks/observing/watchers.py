"""Implements each way to watch training: its callbacks, and a context in which the steps run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import tensorflow as tf

from tfdist._src import native
from tfdist._src.comm import tracing
from tfdist._src.monitoring.training import record
from tfdist.callbacks import StragglerMonitor, ThroughputLogger, Timeline

NEVER = 10**9
Callbacks = Sequence[keras.callbacks.Callback]


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Turns off the core's recorder in this context.

    The graphs of steps that are traced in this context have no operations that report to the
    recorder.
    """
    core = native.load().library
    with (
        mock.patch.object(native, "has_ops", lambda: False),
        mock.patch.object(tracing, "ready", lambda *_, **__: tf.no_op()),
    ):
        core.tfd_record(0)
        try:
            yield
        finally:
            core.tfd_record(1)


@contextlib.contextmanager
def running(model: keras.Model, callbacks: Callbacks) -> Iterator[None]:
    """Calls the methods `on_train_begin` and `on_train_end` of callbacks around this context."""
    for callback in callbacks:
        callback.set_model(model)
        callback.on_train_begin()
        callback.on_epoch_begin(0)
    yield
    for callback in callbacks:
        callback.on_train_end()


@contextlib.contextmanager
def timing_steps() -> Iterator[None]:
    """Records the durations of steps for the metrics in this context.

    `fit` does this in every training run with `TFDIST_METRICS_PORT`.
    """
    record.epoch_begins()
    yield
    record.fit_ends()


def make(watch: str, folder: Path) -> tuple[Callbacks, Callable[[], AbstractContextManager[Any]]]:
    """Creates the callbacks of a way to watch.

    Args:
        watch: a key of `WATCHES`.
        folder: the folder for the file of the `Timeline`.

    Returns:
        The callbacks, and a function that returns the context manager in which the steps run.
    """
    # The window of `timeline` never ends. So the timed steps are in the window, and the measured
    # time does not include the time to write the file. The window of `outside` never begins.
    timeline, outside = (
        Timeline(folder / "trace.json", (first, NEVER + 1)) for first in (1, NEVER)
    )
    logger, monitor = ThroughputLogger(), StragglerMonitor(every=10)
    return {
        "none": ([], unrecorded),
        "none_again": ([], unrecorded),
        "recorder": ([], contextlib.nullcontext),
        "throughput": ([logger], contextlib.nullcontext),
        "straggler": ([monitor], contextlib.nullcontext),
        "timeline": ([timeline], contextlib.nullcontext),
        "metrics": ([], timing_steps),
        "all": ([logger, monitor, outside], timing_steps),
    }[watch]
