"""What a worker runs to be watched in each way: the callbacks, between their begin and end."""

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
    """The recorder is off, and a step that is traced here has no marks for it."""
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
    """These callbacks' training has begun, and ends with this context."""
    for callback in callbacks:
        callback.set_model(model)
        callback.on_train_begin()
        callback.on_epoch_begin(0)
    yield
    for callback in callbacks:
        callback.on_train_end()


@contextlib.contextmanager
def timing_steps() -> Iterator[None]:
    """The metrics count the durations of steps, as they do in every `fit` if they are served."""
    record.epoch_begins()
    yield
    record.fit_ends()


def make(watch: str, folder: Path) -> tuple[Callbacks, Callable[[], AbstractContextManager[Any]]]:
    """Makes the callbacks of a way to watch, and what else has to be entered around its steps.

    Args:
        watch: a key of `WATCHES`.
        folder: for the timeline.
    """
    # Only the steps inside the timeline's window are timed, and not that it is written.
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
