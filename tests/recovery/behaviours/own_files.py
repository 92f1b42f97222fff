"""Trainings whose workers read files of their own, lose workers and get others."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.recovery.behaviours import surviving
from tests.strategy.behaviours.common import scope

FILES, ROWS = 6, 8  # of each file
BATCH = 12


class Seen(keras.metrics.Metric):
    """How often each row has been trained in an epoch, as digits of a number.

    Args:
        file: of which file.
    """

    def __init__(self, file: int) -> None:
        super().__init__(name=f"file {file}", dtype="float64")
        self._file = file
        self._seen = self.add_variable((ROWS,), "zeros", dtype="float64", name="seen")

    def update_state(self, y: Any, z: Any, sample_weight: Any = None) -> None:
        number = tf.cast(y[:, 0], tf.int32)
        mine = tf.where(number // ROWS == self._file, number % ROWS, -1)
        self._seen.assign_add(tf.reduce_sum(tf.one_hot(mine, ROWS, dtype=tf.float64), axis=0))

    def result(self) -> Any:
        return tf.reduce_sum(self._seen * 10.0 ** np.arange(ROWS))


def write(folder: Path) -> None:
    """Writes files of the numbers of rows."""
    for file in range(FILES):
        lines = [f"{file * ROWS + row}\n" for row in range(ROWS)]
        (folder / f"{file}.txt").write_text("".join(lines))


def data(settings: dict[str, Any]) -> tf.data.Dataset:
    names = sorted(map(str, Path(settings["folder"]).glob("*.txt")))
    numbers = tf.data.TextLineDataset(names).map(tf.strings.to_number)
    dataset = numbers.map(lambda n: (tf.stack([n, n + 1]) / 48, n[None])).batch(BATCH)
    if settings.get("steps_per_epoch"):
        dataset = dataset.repeat()
    options, policies = tf.data.Options(), tf.data.experimental.AutoShardPolicy
    options.experimental_distribute.auto_shard_policy = policies[settings.get("policy", "FILE")]
    return dataset.with_options(options)


def trained(strategy: Any, settings: dict[str, Any], faults: dict[int, Any]) -> dict[str, Any]:
    """How often each row of each file was trained in each epoch."""
    fault = faults.get(tfdist.rank())
    with scope(strategy):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("adam", "mse", metrics=[Seen(file) for file in range(FILES)])
    callbacks = [surviving.Fault(*fault)] if fault else []
    callbacks += [
        journal := surviving.Journal(),
        tfdist.callbacks.Elastic(**settings.get("elastic", {})),
        *settings.get("more", list)(),
    ]
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        history = model.fit(
            data(settings),
            epochs=4,
            steps_per_epoch=settings.get("steps_per_epoch"),
            verbose=0,
            callbacks=callbacks,
        ).history
    seen = [
        [f"{history[f'file {file}'][epoch]:08.0f}"[::-1] for file in range(FILES)]
        for epoch in range(len(history["loss"]))
    ]
    batches = [event for event in journal.events if event[0] == "batch ended"]
    return {
        "seen": seen,
        "weights": model.get_weights(),
        "changes": journal.changes,
        "steps": batches,
        "said": said.getvalue(),
    }


def coming(_: Any, *arguments: Any) -> Any:
    """Trains on some of the workers, to which another one comes."""
    return surviving.come(trained, *arguments)
