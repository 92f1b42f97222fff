"""Trains the Keras models on JAX.

Each function in `TRAINING` takes steps, and calls `clock.tick` after each step. It never returns.
"""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "jax"

from collections.abc import Iterator

import jax
import keras
import numpy as np

from benchmarks.step_time.clock import Clock
from benchmarks.step_time.keras_models import BUILDERS
from benchmarks.step_time.models import Workload

ENDLESS = 10**9


def alone(workload: Workload, rank: int, addresses: list[str], clock: Clock) -> None:
    """Trains with plain `fit`, without communication."""
    fit(workload, clock)


def data_parallel(workload: Workload, rank: int, addresses: list[str], clock: Clock) -> None:
    """Trains with `fit` and Keras's `DataParallel`. JAX communicates through gloo on CPUs."""
    if addresses:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        keras.distribution.initialize(addresses[0], len(addresses), rank)
        keras.distribution.set_distribution(
            keras.distribution.DataParallel(auto_shard_dataset=False)
        )
    fit(workload, clock)


def fit(workload: Workload, clock: Clock) -> None:
    """Trains with `model.fit`, and computes the loss and the accuracy."""
    model = BUILDERS[workload.name]()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(workload.optimizer, loss, metrics=["accuracy"])
    tick = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: clock.tick(logs["loss"])
    )
    batches = endless(workload)
    model.fit(batches, steps_per_epoch=ENDLESS, verbose=0, callbacks=[tick])


def endless(workload: Workload) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the same batch forever."""
    random = np.random.default_rng(0)
    if workload.integers:
        x = random.integers(workload.classes, size=(workload.rows, *workload.shape))
        x = x.astype("int32")
    else:
        x = random.standard_normal((workload.rows, *workload.shape)).astype("float32")
    y = random.integers(workload.classes, size=(workload.rows, *workload.labels)).astype("int32")
    while True:
        yield x, y


TRAINING = {"jax": data_parallel, "jax_unconnected": alone}
