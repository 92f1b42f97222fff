"""Trains the Keras models on TensorFlow.

Each function in `TRAINING` takes steps, and calls `clock.tick` after each step. It never returns.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.step_time.clock import Clock
from benchmarks.step_time.keras_models import BUILDERS
from benchmarks.step_time.models import Workload

ENDLESS = 10**9


def alone(workload: Workload, rank: int, addresses: list[str], clock: Clock) -> None:
    """Trains with `fit` and without a strategy, so the workers do not communicate."""
    fit(workload, workload.rows, None, clock)


def tfdist_native(workload: Workload, rank: int, addresses: list[str], clock: Clock) -> None:
    """Trains with `fit` under tfdist's strategy with its default arguments."""
    import tfdist

    strategy = tfdist.MultiWorkerMirroredStrategy()
    fit(workload, workload.rows * max(1, len(addresses)), strategy, clock)


def tfdist_loop(workload: Workload, rank: int, addresses: list[str], clock: Clock) -> None:
    """Trains in a custom loop under tfdist's strategy."""
    import tfdist

    strategy = tfdist.MultiWorkerMirroredStrategy()
    loop(workload, workload.rows * len(addresses), strategy, clock)


def tfdist_replica_statistics(
    workload: Workload, rank: int, addresses: list[str], clock: Clock
) -> None:
    """Trains like `tfdist_native`, but batch normalization uses only the rows of each worker."""
    os.environ["TFDIST_BATCH_STATISTICS"] = "replica"
    tfdist_native(workload, rank, addresses, clock)


def tfdist_mse(workload: Workload, rank: int, addresses: list[str], clock: Clock) -> None:
    """Trains under tfdist's strategy. The loss is the mean squared error of the probabilities."""
    fit_probabilities(workload, addresses, clock, mean_square)


def tfdist_rmse(workload: Workload, rank: int, addresses: list[str], clock: Clock) -> None:
    """Trains like `tfdist_mse`, with the root mean squared error as the loss.

    This loss of a batch is not a mean over its rows.
    """
    fit_probabilities(workload, addresses, clock, lambda y, p: keras.ops.sqrt(mean_square(y, p)))


def tfdist_dice(workload: Workload, rank: int, addresses: list[str], clock: Clock) -> None:
    """Trains like `tfdist_mse`, with the Dice loss of the whole batch."""
    fit_probabilities(workload, addresses, clock, lambda y, p: 1 - overlap(y, p))


def tfdist_f1(workload: Workload, rank: int, addresses: list[str], clock: Clock) -> None:
    """Trains like `tfdist_mse`, with F1 as a metric, which is a ratio of sums over the batch."""
    rounded = of_probabilities(lambda y, p: overlap(y, keras.ops.round(p)))
    fit_probabilities(workload, addresses, clock, mean_square, rounded)


def mean_square(y: Any, p: Any) -> Any:
    """Returns the mean squared error of the whole batch."""
    return keras.ops.mean(keras.ops.square(y - p))


def overlap(y: Any, p: Any) -> Any:
    """Returns the Dice coefficient of the whole batch.

    If all predictions are 0 or 1, this is the F1 score.
    """
    return 2 * keras.ops.sum(y * p) / (keras.ops.sum(y) + keras.ops.sum(p) + 1e-6)


def of_probabilities(compute: Any) -> Any:
    """Converts a function of one-hot vectors and probabilities to one of labels and logits."""

    def function(labels: Any, logits: Any) -> Any:
        return compute(keras.ops.one_hot(labels, logits.shape[-1]), keras.ops.softmax(logits))

    return function


def fit_probabilities(
    workload: Workload, addresses: list[str], clock: Clock, loss: Any, *metrics: Any
) -> None:
    """Trains with `fit` under tfdist's strategy, with a loss that is computed from probabilities.

    Args:
        workload: the model and the size of its input.
        addresses: the addresses of the workers.
        clock: the clock that counts the steps.
        loss: a function of one-hot vectors and probabilities.
        metrics: functions of labels and logits. They are computed in addition to the accuracy.
    """
    import tfdist

    strategy = tfdist.MultiWorkerMirroredStrategy()
    rows = workload.rows * len(addresses)
    fit(workload, rows, strategy, clock, loss=of_probabilities(loss), metrics=list(metrics))


def tfdist_xla(workload: Workload, rank: int, addresses: list[str], clock: Clock) -> None:
    """Trains with `fit` under tfdist's strategy, with `jit_compile=True`."""
    import tfdist

    strategy = tfdist.MultiWorkerMirroredStrategy()
    fit(workload, workload.rows * max(1, len(addresses)), strategy, clock, jit_compile=True)


def alone_xla(workload: Workload, rank: int, addresses: list[str], clock: Clock) -> None:
    """Trains like `alone`, with `jit_compile=True`."""
    fit(workload, workload.rows, None, clock, jit_compile=True)


def tfdist_sharded(workload: Workload, rank: int, addresses: list[str], clock: Clock) -> None:
    """Trains with `fit` under tfdist's strategy. Each worker updates a part of the weights."""
    import tfdist

    strategy = tfdist.MultiWorkerMirroredStrategy(shard_optimizer=True)
    fit(workload, workload.rows * len(addresses), strategy, clock)


def tfdist_tensorflow(workload: Workload, rank: int, addresses: list[str], clock: Clock) -> None:
    """Trains with `fit` under tfdist's strategy, which uses TensorFlow's collectives."""
    import tfdist

    strategy = tfdist.MultiWorkerMirroredStrategy(communication="tensorflow")
    fit(workload, workload.rows * len(addresses), strategy, clock)


def fit(workload: Workload, rows: int, strategy: Any, clock: Clock, **settings: Any) -> None:
    """Trains with `model.fit`, and computes the loss and the accuracy.

    Args:
        workload: the model and the size of its input.
        rows: the number of rows in the global batch.
        strategy: a `tf.distribute` strategy, or None.
        clock: the clock that counts the steps.
        settings: further keyword arguments of `fit_with`.
    """
    tick = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: clock.tick(logs["loss"])
    )
    fit_with(workload, rows, strategy, tick, **settings)


def fit_with(
    workload: Workload,
    rows: int,
    strategy: Any,
    callback: keras.callbacks.Callback,
    *,
    jit_compile: bool = False,
    loss: Any = None,
    metrics: Sequence[Any] = (),
) -> None:
    """Trains like `fit`, but calls a callback instead of the clock.

    Args:
        workload: the model and the size of its input.
        rows: the number of rows in the global batch.
        strategy: a `tf.distribute` strategy, or None.
        callback: the callback for `model.fit`.
        jit_compile: the argument `jit_compile` of `model.compile`.
        loss: the loss function; None for the usual loss function of all models.
        metrics: metrics in addition to the accuracy.
    """
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = BUILDERS[workload.name]()
        model.compile(
            workload.optimizer,
            loss or loss_function(),
            metrics=["accuracy", *metrics],
            jit_compile=jit_compile,
        )
    data = endless(workload, rows)
    model.fit(data, shuffle=False, steps_per_epoch=ENDLESS, verbose=0, callbacks=[callback])


def stock_loop(workload: Workload, rank: int, addresses: list[str], clock: Clock) -> None:
    """Trains in a custom loop under TensorFlow's strategy, because Keras 3's `fit` fails there."""
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    loop(workload, workload.rows * len(addresses), strategy, clock)


def loop(workload: Workload, rows: int, strategy: Any, clock: Clock) -> None:
    """Trains in a custom loop that calls `strategy.run`, as in TensorFlow's guides.

    See `fit` for the arguments.
    """
    with strategy.scope():
        model = BUILDERS[workload.name]()
        optimizer = keras.optimizers.get(workload.optimizer)
        optimizer.build(model.trainable_variables)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        loss_of_rows = loss_function(reduction="none")
    batches = iter(strategy.experimental_distribute_dataset(endless(workload, rows)))

    def train_step(batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            losses = tf.reduce_mean(tf.reshape(loss_of_rows(y, logits), [tf.shape(x)[0], -1]), 1)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=rows)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(grads)
        accuracy.update_state(y, logits)
        return loss

    @tf.function
    def step(batches: Any) -> Any:
        losses = strategy.run(train_step, args=(next(batches),))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    while True:
        clock.tick(step(batches))


def loss_function(**options: Any) -> Any:
    """Returns the usual loss function, which is the same for all models."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def endless(workload: Workload, rows: int) -> tf.data.Dataset:
    """Returns a dataset that repeats one batch forever. Reading it takes almost no time."""
    random = np.random.default_rng(0)
    if workload.integers:
        x = random.integers(workload.classes, size=(rows, *workload.shape)).astype("int32")
    else:
        x = random.standard_normal((rows, *workload.shape)).astype("float32")
    y = random.integers(workload.classes, size=(rows, *workload.labels)).astype("int32")
    return tf.data.Dataset.from_tensors((x, y)).repeat()


TRAINING = {
    "tfdist": tfdist_native,
    "tfdist_loop": tfdist_loop,
    "tfdist_replica_statistics": tfdist_replica_statistics,
    "tfdist_mse": tfdist_mse,
    "tfdist_rmse": tfdist_rmse,
    "tfdist_dice": tfdist_dice,
    "tfdist_f1": tfdist_f1,
    "tfdist_xla": tfdist_xla,
    "tfdist_tensorflow": tfdist_tensorflow,
    "tfdist_sharded": tfdist_sharded,
    "keras": alone,
    "keras_xla": alone_xla,
    "stock": stock_loop,
    "unconnected": alone,
    "unconnected_xla": alone_xla,
}
