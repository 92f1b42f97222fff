"""The ways to train that are compared: each takes steps for ever and tells a clock of them."""

from __future__ import annotations

from typing import Any

from stepping.clock import Clock
from stepping.models import Workload

ENDLESS = 10**9


def keras_fit(workload: Workload, workers: int, clock: Clock) -> None:
    """Plain Keras, without connection to anything."""
    fit(workload, workload.rows, None, clock)


def tfdist_fit(workload: Workload, workers: int, clock: Clock) -> None:
    """`fit` under `tfdist.MultiWorkerMirroredStrategy`."""
    import tfdist

    strategy = tfdist.MultiWorkerMirroredStrategy()
    fit(workload, workload.rows * workers, strategy, clock)


def fit(workload: Workload, rows: int, strategy: Any, clock: Clock) -> None:
    """Trains by `model.fit` with loss and accuracy.

    Args:
        workload: the model.
        rows: the global batch.
        strategy: a tf.distribute strategy, or None.
        clock: told of each step.
    """
    import contextlib

    import keras

    with strategy.scope() if strategy else contextlib.nullcontext():
        model = workload.build()
        model.compile("sgd", loss_function(), metrics=["accuracy"])
    tick = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: clock.tick(logs["loss"])
    )
    data = endless(workload, rows)
    model.fit(data, shuffle=False, steps_per_epoch=ENDLESS, verbose=0, callbacks=[tick])


def stock_loop(workload: Workload, workers: int, clock: Clock) -> None:
    """A training loop of one's own under TensorFlow's strategy, whose `fit` fails on Keras 3."""
    import keras
    import tensorflow as tf

    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    rows = workload.rows * workers
    with strategy.scope():
        model = workload.build()
        optimizer = keras.optimizers.SGD()
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
    """What all models are trained on."""
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def endless(workload: Workload, rows: int) -> Any:
    """The same batch for ever, which costs next to nothing to read."""
    import tensorflow as tf

    return tf.data.Dataset.from_tensors(workload.data(rows)).repeat()


BACKENDS = {
    "keras": keras_fit,
    "tfdist": tfdist_fit,
    "stock": stock_loop,
    "unconnected": keras_fit,
}
