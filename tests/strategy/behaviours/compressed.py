"""Training with compressed gradients, in strategies of their own."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.strategy.behaviours.common import (
    compile_mlp,
    cross_entropy,
    fit,
    outcome,
    rows,
    scope,
)
from tests.strategy.behaviours.compression import errors_of, strategy_of


def every_codec(strategy, name):
    x, y = rows(96)
    model = compile_mlp(strategy_of(name))
    before = model.get_weights()
    return outcome(model, fit(model, x, y, batch_size=16, epochs=4), before=before)


def _codec_of_the_docstring():
    """The codec that the docstring of `Codec` shows."""
    (code,) = re.findall(
        r"```python\n(.*?)```", inspect.getdoc(tfdist.compression.Codec), re.DOTALL
    )
    names = {"dataclasses": dataclasses, "tf": tf, "tfdist": tfdist, "__name__": __name__}
    exec(textwrap.dedent(code), names)
    return names["Rounded"]()


def codec_of_the_user(strategy, within_hosts):
    x, y = rows(96)
    policy = tfdist.compression.Policy(
        _codec_of_the_docstring(), smallest=0, within_hosts=within_hosts
    )
    model = compile_mlp(tfdist.MultiWorkerMirroredStrategy(compression=policy))
    result = outcome(model, fit(model, x, y, batch_size=16, epochs=4))
    return {**result, "errors": errors_of(model)}


def exact(strategy):
    x, y = rows(96)
    model = compile_mlp(strategy)
    return outcome(model, fit(model, x, y, batch_size=16, epochs=4))


def from_host_to_host(strategy, name):
    """The codec where it belongs: between hosts alone."""
    x, y = rows(96)
    model = compile_mlp(strategy_of(name, within_hosts=False))
    groups = {"in_all": None, "of_workers": "workers"}
    before = {key: tfdist.collective.statistics(group).sent_bytes for key, group in groups.items()}
    traffic = tfdist.callbacks.TrafficLogger()
    history = fit(model, x, y, batch_size=16, epochs=4, callbacks=[traffic])
    sent = {
        key: tfdist.collective.statistics(group).sent_bytes - before[key]
        for key, group in groups.items()
    }
    return {**outcome(model, history), "sent": sum(history["sent_bytes"]), **sent}


def eagerly(strategy):
    x, _ = rows(32)
    with strategy_of("int8").scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse", run_eagerly=True)
    try:
        fit(model, x[:, :8], np.zeros((32, 3)), batch_size=16, epochs=1)
    except tfdist.errors.UnsupportedError as error:
        return str(error)
    return "no error"


def sparse(strategy, compressed):
    """A model with an embedding: what of it is kept, and its weights."""
    chosen = strategy_of("onebit", sparse=compressed)
    with chosen.scope():
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Embedding(50, 8), keras.layers.Dense(3)]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse")
    tokens = np.random.default_rng(0).integers(0, 50, (32, 4))
    history = fit(model, tokens, np.ones((32, 4, 3)), batch_size=16, epochs=3)
    return {**outcome(model, history), "errors": errors_of(model)}


def overflow_without_rows(strategy):
    """The gradient of an embedding has no rows on one worker, where the other's overflows."""
    chosen = strategy_of("int8")
    with chosen.scope():
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Embedding(20, 8), keras.layers.Dense(4)]
        )
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=2.0**120
        )
        model.compile(optimizer, "mse")
    before = model.get_weights()
    y = np.full((1, 4, 4), 1e6, "float32")
    model.fit(np.ones((1, 4), "int32"), y, batch_size=2, verbose=0)
    return {
        "unchanged": all(map(np.array_equal, model.get_weights(), before)),
        "scale": float(model.optimizer.dynamic_scale.numpy()),
    }


def warmup(strategy, steps):
    x, y = rows(96)
    model = compile_mlp(strategy_of("onebit", warmup_steps=steps))
    result = outcome(model, fit(model, x, y, batch_size=16, epochs=4))
    return {**result, "errors": errors_of(model)}


def excluded(strategy):
    x, y = rows(96)
    model = compile_mlp(strategy_of("onebit", exclude=("kernel",)))
    result = outcome(model, fit(model, x, y, batch_size=16, epochs=4))
    return {**result, "errors": errors_of(model)}


def sequences(strategy, name):
    """Of a dense layer on sequences, TensorFlow does not know the shape of the gradient."""
    x, y = rows(96)
    with scope(strategy_of(name)):
        layers = [keras.Input((4, 2)), keras.layers.Dense(16), keras.layers.Flatten()]
        model = keras.Sequential([*layers, keras.layers.Dense(3)])
        model.compile("sgd", cross_entropy())
    return outcome(model, fit(model, x.reshape(-1, 4, 2), y, batch_size=16, epochs=4))


def in_ways_of_keras(strategy):
    optimizers = {
        "accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
        "clipping": lambda: keras.optimizers.SGD(0.1, clipnorm=0.5),
        "adam": lambda: keras.optimizers.Adam(0.01),
        "scaling": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
    }
    results = {name: _with_and_without(strategy, make) for name, make in optimizers.items()}
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    try:
        results["mixed_float16"] = _with_and_without(strategy, lambda: keras.optimizers.SGD(0.1))
    finally:
        keras.mixed_precision.set_dtype_policy("float32")
    return results


def _with_and_without(strategy, optimizer):
    x, y = rows(96)
    models = [compile_mlp(chosen, optimizer) for chosen in (strategy_of("int8"), strategy)]
    return [outcome(model, fit(model, x, y, batch_size=16, epochs=4)) for model in models]


def overflow_on_one_worker(strategy):
    """The loss of one worker's rows overflows in the first step, which all skip."""
    chosen = strategy_of("onebit")
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
        "errors": errors_of(model),
        "weights": model.get_weights(),
    }


def custom_loop(strategy):
    chosen = strategy_of("ef_signsgd")
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
    return {"losses": losses, "weights": model.get_weights(), "errors": errors_of(model)}


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
    for chosen in (strategy_of("onebit"), strategy):
        with chosen.scope():
            optimizer = keras.optimizers.SGD()
        try:
            chosen.run(lambda optimizer=optimizer: optimizer.apply([tf.ones([4, 4])]))
        except ValueError as error:
            messages.append(str(error))
    return messages
