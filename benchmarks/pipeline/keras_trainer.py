"""Trains Keras models, in a pipeline with tfdist or in one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.pipeline.backends import WHOLE
from benchmarks.pipeline.batch import WORKLOADS, Workload
from benchmarks.pipeline.keras_models import gpt, padded


class Trainer:
    """Trains models with `fit`. There is one model for each schedule and number of microbatches.

    Args:
        addresses: the addresses of the workers of the pipeline; empty for one process.
        rank: the rank of this worker.
        model: a key of `WORKLOADS`. If `pass_seconds` is set, it determines only the number of
            rows.
        pass_seconds: None for a real model. Otherwise, the stages of the model wait instead of
            computing, and this is the time of a pass of a microbatch through all stages of a
            worker. The passes are the forward pass and the two halves of the backward pass.
        jit: whether XLA compiles the models.
    """

    def __init__(
        self,
        addresses: list[str],
        rank: int,
        model: str,
        pass_seconds: float | None,
        *,
        jit: bool = False,
    ) -> None:
        self._workers = len(addresses)
        self._size = WORKLOADS[model]
        self._pass_seconds, self._jit = pass_seconds, jit
        self._models: dict[tuple[str, int], keras.Model] = {}
        waits = pass_seconds is not None
        self._data = endless(*(_columns(self._size) if waits else _characters(self._size)))

    def begin(self) -> None:
        """Does nothing. The answer to this request shows that the framework is imported."""

    def steps(self, schedule: str, microbatches: int, count: int) -> float:
        """Takes steps, and returns their total time in seconds."""
        watch = Stopwatch(count)
        model = self._model(schedule, microbatches)
        model.fit(self._data, steps_per_epoch=count, verbose=0, callbacks=[watch])
        return watch.seconds

    def timeline(self, schedule: str, microbatches: int) -> list[list[tuple[float, float]]]:
        """Takes a step, and returns the start and the end of each action in seconds.

        The result contains a list for each rank. Each list is in the order in which the rank
        executes its actions.
        """
        batch = next(iter(self._data))
        for _ in range(2):  # The first step includes tracing, so the second one is returned.
            timeline = self._model(schedule, microbatches).timeline_on_batch(*batch)
        return [[(span.start, span.end) for span in own] for own in timeline.spans]

    def _model(self, schedule: str, microbatches: int) -> keras.Model:
        key = (schedule, microbatches)
        if key not in self._models:
            make = self._whole if schedule == WHOLE else self._in_stages
            self._models[key] = make(schedule, microbatches)
        return self._models[key]

    def _whole(self, schedule: str, microbatches: int) -> keras.Model:
        model = gpt(self._size)
        model.compile("sgd", _cross_entropy(), jit_compile=self._jit)
        return model

    def _in_stages(self, schedule: str, microbatches: int) -> keras.Model:
        import tfdist

        strategy = tfdist.PipelineStrategy(microbatches=microbatches, schedule=schedule)
        cuts, build = None, self._build_gpt
        if self._pass_seconds is not None:
            seconds = self._pass_seconds * self._workers / strategy.stages
            cuts = [f"wait_{i}" for i in range(strategy.stages - 1)]
            build = _padded_builder(strategy.stages, seconds)
        with strategy.scope():
            model = tfdist.PipelineModel(build, cuts=cuts)
            loss = _cross_entropy() if cuts is None else "mse"
            model.compile("sgd", loss, jit_compile=self._jit)
        return model

    def _build_gpt(self) -> keras.Model:
        return gpt(self._size)


class Stopwatch(keras.callbacks.Callback):  # type: ignore[misc]
    """Times an epoch from the start of its first step to the end of its last step.

    Args:
        count: the number of steps in the epoch.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self._last = count - 1
        self.seconds = 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Starts the clock at the first step."""
        if batch == 0:
            self._start = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stops the clock at the end of the last step."""
        if batch == self._last:
            float(logs["loss"])
            self.seconds = time.perf_counter() - self._start


def endless(x: np.ndarray, y: np.ndarray) -> tf.data.Dataset:
    """Returns a dataset that repeats one batch forever. Reading it takes almost no time."""
    return tf.data.Dataset.from_tensors((x, y)).repeat()


def _characters(size: Workload) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    shape = (size.rows, size.length)
    return tuple(random.integers(size.vocabulary, size=shape).astype("int32") for _ in range(2))


def _columns(size: Workload) -> tuple[np.ndarray, np.ndarray]:
    return np.ones([size.rows, 1], "float32"), np.ones([size.rows, 1], "float32")


def _cross_entropy() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _padded_builder(stages: int, seconds: float) -> Callable[[], keras.Model]:
    return lambda: padded(stages, seconds)
