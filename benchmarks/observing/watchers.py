"""The callbacks and contexts of each way to watch a worker."""

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
    """Turns off the recorder; steps that are traced in this context have no marks for it."""
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
    """Calls the methods of callbacks for the begin and the end of training around this context."""
    for callback in callbacks:
        callback.set_model(model)
        callback.on_train_begin()
        callback.on_epoch_begin(0)
    yield
    for callback in callbacks:
        callback.on_train_end()


@contextlib.contextmanager
def timing_steps() -> Iterator[None]:
    """Makes the metrics count the durations of steps, as every `fit` does if they are served."""
    record.epoch_begins()
    yield
    record.fit_ends()


def make(watch: str, folder: Path) -> tuple[Callbacks, Callable[[], AbstractContextManager[Any]]]:
    """Returns the callbacks of a way to watch, and a function that returns a context for its steps.

    Args:
        watch: a key of `WATCHES`.
        folder: the folder for the timeline.
    """
    # The window of `timeline` never ends, so that steps in the window are timed, but not writing.
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
