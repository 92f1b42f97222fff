"""Trains with `fit` under tfdist's strategy. All codecs use the same weights and batches."""

from __future__ import annotations

from multiprocessing.connection import Connection

import keras
import tensorflow as tf
from keras import layers

import tfdist
from benchmarks.compression.codecs import NONE, compression_of
from benchmarks.compression.examples import make_batches, make_held_out
from benchmarks.compression.meter import Meter
from benchmarks.compression.tasks import Task
from benchmarks.step_time.keras_models import mlp

ENDLESS = 10**9


def tiny() -> keras.Model:
    """Returns a small model for tests. One of its gradients is large enough to be compressed."""
    return keras.Sequential([keras.Input([64]), layers.Dense(128, "relu"), layers.Dense(4)])


BUILDERS = {"tiny": tiny, "mlp": mlp}


def train(task: Task, codec: str, workers: int, pipe: Connection) -> None:
    """Takes the steps that the driver requests, until the driver closes the pipe.

    Args:
        task: the task to train.
        codec: a name in `codecs.KNOWN`.
        workers: the number of workers.
        pipe: the pipe to the driver.

    Raises:
        EOFError: the driver has closed the pipe.
    """
    strategy = tfdist.MultiWorkerMirroredStrategy(compression=compression_of(codec))
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = BUILDERS[task.name]()
        loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(task.learning_rate), loss_function)
    x, y = make_held_out(task)

    def find_chosen() -> str:
        compressor = strategy.extended.compressor
        return NONE if compressor is None else compressor.chosen

    meter = Meter(
        pipe,
        count_bytes=lambda: tfdist.collective.statistics().sent_bytes,
        find_loss=lambda: float(loss_function(y, model(x, training=False))),
        find_chosen=find_chosen,
    )
    batches = tf.data.Dataset.from_tensor_slices(make_batches(task, workers)).repeat()
    model.fit(batches, shuffle=False, steps_per_epoch=ENDLESS, verbose=0, callbacks=[meter])
