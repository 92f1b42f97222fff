"""Training with compressed gradients, in strategies of their own."""

from __future__ import annotations

import unittest.mock
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.strategies.behaviours.common import (
    compile_mlp,
    cross_entropy,
    fit,
    outcome,
    rows,
    scope,
)
from tfdist.compression import CODECS, Auto, OneBit, Policy
from tfdist.compression import auto as auto_module
from tfdist.compression.measuring import Measurement
from tfdist.compression.registry import name_of
from tfdist.trainer import adapting


def _codec(name: str) -> Any:
    """Settings for a few steps of a small model without momentum."""
    settings = {"dgc": {"momentum": 0}, "randomk": {"ratio": 0.25}}
    return CODECS[name](**settings.get(name, {}))


def _strategy(name: str, *, within_hosts: bool = True, **settings: Any) -> Any:
    policy = Policy(_codec(name), smallest=0, within_hosts=within_hosts, **settings)
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


def from_host_to_host(strategy, name):
    """The codec where it belongs: between hosts alone."""
    x, y = rows(96)
    model = compile_mlp(_strategy(name, within_hosts=False))
    traffic = tfdist.callbacks.TrafficLogger()
    history = fit(model, x, y, batch_size=16, epochs=4, callbacks=[traffic])
    sent = model.distribute_strategy.extended.group.sent_and_received()[0]
    return {**outcome(model, history), "sent": history["sent_bytes"], "in_all": sent}


def scheduled(strategy):
    x, y = rows(96)
    model = compile_mlp(strategy)
    first = Policy(CODECS["onebit"](), smallest=0, within_hosts=True)
    second = Policy(CODECS["topk"](), smallest=0, within_hosts=True)
    schedule = tfdist.callbacks.CompressionSchedule({1: first, 2: second, 4: None})
    names, kept = [], []

    def look(epoch, logs):
        names.append(strategy.extended.compressor.chosen)
        kept.append(_errors(model) if epoch else [])

    look_each = keras.callbacks.LambdaCallback(on_epoch_end=look)
    history = fit(model, x, y, batch_size=16, epochs=5, callbacks=[schedule, look_each])
    strategy.extended.compressor.change(None)
    return {**outcome(model, history), "names": names, "kept": kept}


def scheduled_differently(strategy):
    x, y = rows(32)
    model = compile_mlp(strategy)
    name = "int8" if strategy.extended.worker_rank else "onebit"
    schedule = tfdist.callbacks.CompressionSchedule({0: name})
    try:
        fit(model, x, y, batch_size=16, epochs=1, callbacks=[schedule])
    except tfdist.errors.ProgramMismatchError as error:
        return str(error)
    return "no error"


def chosen_by_measurement(strategy, candidates):
    x, y = rows(96)
    auto = Auto(tuple(_codec(name) for name in candidates))
    chosen = tfdist.MultiWorkerMirroredStrategy(compression=Policy(auto, smallest=0))
    model = compile_mlp(chosen)
    history = fit(model, x, y, batch_size=16, epochs=4)
    choice = chosen.extended.compressor.choice
    seconds = {name_of(codec): s for codec, s in choice.measurement.seconds.items()}
    return {
        **outcome(model, history),
        "chosen": chosen.extended.compressor.chosen,
        "seconds": seconds,
        "again": choice.reconsider(),
    }


def links_that_change(strategy):
    """What a probe finds is made up, and so the choice is made again, in an epoch's beginning."""
    x, y = rows(96)
    chosen = tfdist.MultiWorkerMirroredStrategy(compression=Policy(Auto(), smallest=0))
    model = compile_mlp(chosen)
    found = [
        Measurement({None: 1e-3, OneBit(): 2e-3}, 1e-3),
        Measurement({None: 4e-3, OneBit(): 2e-3}, 4e-3),
    ]
    names = []
    look = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: names.append(chosen.extended.compressor.chosen)
    )
    with (
        unittest.mock.patch.object(adapting, "_SECONDS", 0.0),
        unittest.mock.patch.object(auto_module, "probe", side_effect=[1.1e-3, 4e-3, 4e-3, 3e-3]),
        unittest.mock.patch.object(auto_module, "measure", side_effect=found),
    ):
        history = fit(model, x, y, batch_size=16, epochs=4, callbacks=[look])
    return {**outcome(model, history), "names": names, "errors": _errors(model)}


def eagerly(strategy):
    x, _ = rows(32)
    with _strategy("int8").scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse", run_eagerly=True)
    try:
        fit(model, x[:, :8], np.zeros((32, 3)), batch_size=16, epochs=1)
    except tfdist.errors.UnsupportedError as error:
        return str(error)
    return "no error"


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


def sequences(strategy, name):
    """Of a dense layer on sequences, TensorFlow does not know the shape of the gradient."""
    x, y = rows(96)
    with scope(_strategy(name)):
        layers = [keras.Input((4, 2)), keras.layers.Dense(16), keras.layers.Flatten()]
        model = keras.Sequential([*layers, keras.layers.Dense(3)])
        model.compile("sgd", cross_entropy())
    return outcome(model, fit(model, x.reshape(-1, 4, 2), y, batch_size=16, epochs=4))


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
