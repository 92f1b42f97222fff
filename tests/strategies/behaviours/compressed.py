"""Training with compressed gradients, in strategies of their own."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.strategies.behaviours.common import compile_mlp, fit, outcome, rows
from tfdist.compression import CODECS, Policy


def _strategy(name: str, **settings: Any) -> Any:
    policy = Policy(CODECS[name](), smallest=0, within_hosts=True, **settings)
    return tfdist.MultiWorkerMirroredStrategy(compression=policy)


def _errors(model: keras.Model) -> list[np.ndarray]:
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    kept = optimizer.compression_state
    return [e.numpy() for e in getattr(kept, "error", {}).values()]


def every_codec(strategy, name):
    x, y = rows(96)
    model = compile_mlp(_strategy(name))
    return outcome(model, fit(model, x, y, batch_size=16, epochs=4))


def exact(strategy):
    x, y = rows(96)
    model = compile_mlp(strategy)
    return outcome(model, fit(model, x, y, batch_size=16, epochs=4))


def warmup(strategy, steps):
    x, y = rows(96)
    model = compile_mlp(_strategy("onebit", warmup_steps=steps))
    result = outcome(model, fit(model, x, y, batch_size=16, epochs=4))
    return {**result, "errors": _errors(model)}


def excluded(strategy):
    x, y = rows(96)
    model = compile_mlp(_strategy("onebit", exclude=("kernel",)))
    result = outcome(model, fit(model, x, y, batch_size=16, epochs=4))
    return {**result, "errors": _errors(model)}


def in_ways_of_keras(strategy):
    x, y = rows(96)
    results = {}
    for name, optimizer in {
        "accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
        "clipping": lambda: keras.optimizers.SGD(0.1, clipnorm=0.5),
        "adam": lambda: keras.optimizers.Adam(0.01),
        "scaling": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
    }.items():
        results[name] = []
        for compressed in (True, False):
            chosen = _strategy("int8") if compressed else strategy
            model = compile_mlp(chosen, optimizer)
            results[name].append(outcome(model, fit(model, x, y, batch_size=16, epochs=4)))
    return results


def overflow_on_one_worker(strategy):
    """The loss of one worker's rows overflows in the first step, which all skip."""
    chosen = _strategy("onebit")
    with chosen.scope():
        layer = keras.layers.Dense(4, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((4,)), layer])
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=2.0**100
        )
        model.compile(optimizer, "mse")
    x = np.ones((8, 4), "float32")
    x[-1] = 1e20
    before = model.get_weights()
    model.fit(x, np.zeros((8, 4)), batch_size=8, verbose=0, shuffle=False)
    return {
        "unchanged": all(map(np.array_equal, model.get_weights(), before)),
        "scale": float(model.optimizer.dynamic_scale.numpy()),
        "errors": _errors(model),
        "weights": model.get_weights(),
    }


def custom_loop(strategy):
    chosen = _strategy("ef_signsgd")
    x, y = rows(32)
    model = compile_mlp(chosen)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    losses = []

    @tf.function
    def step(batch):
        def replica(inputs, labels):
            with tf.GradientTape() as tape:
                value = tf.nn.compute_average_loss(
                    loss(labels, model(inputs, training=True)), global_batch_size=16
                )
            gradients = tape.gradient(value, model.trainable_variables)
            model.optimizer.apply(gradients, model.trainable_variables)
            return value

        return chosen.reduce("SUM", chosen.run(replica, args=batch), axis=None)

    for _ in range(10):
        for batch in chosen.experimental_distribute_dataset(dataset):
            losses.append(float(step(batch)))
    return {"losses": losses, "weights": model.get_weights(), "errors": _errors(model)}


def checkpoint(strategy, folder):
    """What is lost is part of a worker's checkpoint, and training goes on as if uninterrupted."""
    x, y = rows(96)
    settings = {"batch_size": 16, "epochs": 1, "shuffle": False}
    whole = compile_mlp(_strategy("onebit"))
    fit(whole, x, y, **settings)
    path = f"{folder}/{strategy.extended.worker_rank}/checkpoint"
    tf.train.Checkpoint(model=whole, optimizer=whole.optimizer).write(path)
    fit(whole, x, y, **settings)

    again = compile_mlp(_strategy("onebit"))
    fit(again, x[:16], y[:16], **settings)  # So that all variables exist.
    tf.train.Checkpoint(model=again, optimizer=again.optimizer).read(path).assert_consumed()
    fit(again, x, y, **settings)
    return whole.get_weights(), again.get_weights(), _errors(whole), _errors(again)


def different_codecs(strategy):
    name = "int8" if strategy.extended.worker_rank else "onebit"
    try:
        tfdist.MultiWorkerMirroredStrategy(compression=name)
    except tfdist.errors.ProgramMismatchError as error:
        return str(error)
    return "no error"


def bytes_on_the_wire(strategy, name):
    """What a step sends, with compression and without."""
    x, _ = rows(64, features=512)
    sent = {}
    for key, compression in (("exact", None), (name, name)):
        chosen = tfdist.MultiWorkerMirroredStrategy(compression=compression)
        with chosen.scope():
            model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(512)])
            model.compile("sgd", "mse")
        data = x, np.zeros((64, 512), "float32")
        fit(model, *data, batch_size=16, epochs=1)
        before = tfdist.collective.statistics().sent_bytes
        fit(model, *data, batch_size=16, epochs=1)
        sent[key] = (tfdist.collective.statistics().sent_bytes - before) / 4
    return sent


def applied_before_it_is_built(strategy):
    """Keras says what is missing, as without compression."""
    messages = []
    for chosen in (_strategy("onebit"), strategy):
        with chosen.scope():
            optimizer = keras.optimizers.SGD()
        try:
            chosen.run(lambda optimizer=optimizer: optimizer.apply([tf.ones([4, 4])]))
        except ValueError as error:
            messages.append(str(error))
    return messages
