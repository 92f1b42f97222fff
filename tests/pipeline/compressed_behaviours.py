"""Training in stages whose gradients are compressed between pipelines, and without stages."""

from __future__ import annotations

import contextlib
import os
import unittest.mock

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.harness import gpus
from tests.harness.messages import messages_of
from tests.pipeline.layers import TiedHead
from tests.strategy.behaviours.compression import codec_of
from tfdist._src.comm import native_ops
from tfdist._src.compression import auto as auto_module
from tfdist._src.compression.auto import Measurement
from tfdist._src.compression.compressor import Compressor
from tfdist._src.internals.variables import has_value
from tfdist._src.keras.fit import hooks
from tfdist.compression import Auto, OneBit, Policy

ROWS, BATCH, TOKENS, LENGTH = 45, 16, 12, 4


def policy_of(codec, within_hosts=True, **settings):
    """A codec for matrices of any size, also on one machine; None for none."""
    if codec is None:
        return None
    return Policy(codec_of(codec), smallest=0, within_hosts=within_hosts, **settings)


def strategy_of(stages, compression, microbatches=3):
    """For so many stages; data parallelism for none."""
    if not stages:
        return tfdist.MultiWorkerMirroredStrategy(compression=compression)
    return tfdist.HybridStrategy(
        pipeline_size=stages, microbatches=microbatches, compression=compression
    )


def build():
    """Of dense layers."""
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="tanh", name="first"),
            keras.layers.Dense(16, activation="tanh", name="second"),
            keras.layers.Dense(3, name="last"),
        ]
    )


def build_tied():
    """Of which the first and the last stage share the embedding's matrix."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    embedding = keras.layers.Embedding(TOKENS, 16, name="embedding")
    x = keras.layers.Dense(16, activation="tanh", name="first")(embedding(inputs))
    x = keras.layers.Dense(16, activation="tanh", name="second")(x)
    return keras.Model(inputs, TiedHead(embedding, name="head")(x))


def data(tied, rows=ROWS):
    """Inputs and targets."""
    rng = np.random.default_rng(0)
    if tied:
        x = rng.integers(0, TOKENS, (rows, LENGTH)).astype("int32")
        return x, np.roll(x, 1, axis=1)
    return rng.normal(size=(rows, 8)).astype("float32"), rng.integers(3, size=rows)


def optimizer_of(name):
    """By the name of a test."""
    sgd = keras.optimizers.SGD
    makers = {
        "sgd": lambda: sgd(0.05, momentum=0.9),
        "plain": lambda: sgd(0.1),
        "adam": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3, global_clipnorm=1.0),
        "accumulation": lambda: sgd(0.1, momentum=0.9, gradient_accumulation_steps=2),
        "scaling": lambda: keras.optimizers.LossScaleOptimizer(sgd(0.1), dynamic_growth_steps=4),
    }
    return makers[name]()


def model_of(strategy, tied=False, optimizer="sgd", make=None):
    """A compiled model in the stages of a strategy; of one process without one."""
    keras.utils.set_random_seed(0)
    make = make or (build_tied if tied else build)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        if isinstance(strategy, tfdist.HybridStrategy):
            cuts = {1: [], 2: ["first"], 4: ["embedding", "first", "second"]}[strategy.stages]
            model = tfdist.PipelineModel(make, cuts=cuts)
        else:
            model = make()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer_of(optimizer), loss, metrics=["accuracy"])
    return model


def fit(model, x, y, **settings):
    """What the training logs."""
    given = {"batch_size": BATCH, "epochs": 4, "shuffle": False, "verbose": 0, **settings}
    return model.fit(x, y, **given).history


def outcome(model, history=None):
    """Losses, this rank's weights by their numbers in the whole model, and what a codec keeps."""
    in_stages = isinstance(model, tfdist.PipelineModel)
    whole = model.partition.graph.model if in_stages else model
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    state = getattr(optimizer, "compression_state", None)
    return {
        "history": history,
        "weights": {i: np.array(v) for i, v in enumerate(whole.variables) if has_value(v)},
        "kept": {} if state is None else state.values(),
    }


def train(strategy, codec, stages, tied=False, optimizer="sgd", rows=ROWS, **settings):
    """Trains; one process where there is no strategy."""
    chosen = None if strategy is None else strategy_of(stages, policy_of(codec, **settings))
    model = model_of(chosen, tied, optimizer)
    x, y = data(tied, rows)
    return outcome(model, fit(model, x, y))


def on_gpus(strategy, behaviour, *args):
    """The outcome, and how it is compressed.

    That is the names of the communicators that encode, whether NCCL sends, the types of the devices
    where the codec keeps state, whether the route has a GPU, and the type of what sums in a host.
    """
    prepared, names = [], set()
    prepare, all_reduce = Compressor.prepare, native_ops.compressed_all_reduce

    def note_optimizer(self, optimizer, *args):
        prepared.append((self, optimizer))
        return prepare(self, optimizer, *args)

    def note_name(*args, **settings):
        names.add(args[6])
        return all_reduce(*args, **settings)

    sent = gpus.nccl_calls("ncclSend")
    with (
        unittest.mock.patch.object(Compressor, "prepare", note_optimizer),
        unittest.mock.patch.object(native_ops, "compressed_all_reduce", note_name),
    ):
        result = globals()[behaviour](strategy, *args)
    compressor, optimizer = prepared[-1]
    kept = optimizer.compression_state.variables
    devices = {tf.DeviceSpec.from_string(v.device).device_type for v in kept}
    ((route,),) = compressor._exchanges.values()
    in_host = type(route.encoded_host.group).__name__
    has_gpu = route.encoded is not route.workers
    return result, names, gpus.nccl_calls("ncclSend") > sent, sorted(devices), has_gpu, in_host


def compressed_and_not(strategy, optimizers):
    """The outcomes of some optimizers with a codec and without."""
    return {
        (name, tied): [train(strategy, codec, 2, tied, name) for codec in ("onebit", None)]
        for name in optimizers
        for tied in (False, True)
    }


def overflow(strategy):
    """The rows of one pipeline overflow in the first step, which all skip, and in no other."""
    model = model_of(strategy_of(2, policy_of("onebit")), tied=False, optimizer="scaling")
    before = outcome(model)["weights"]
    x, y = data(tied=False)
    x[BATCH - 1] = np.inf
    fit(model, x[:BATCH], y[:BATCH], epochs=1)
    skipped, scale = outcome(model), float(model.optimizer.dynamic_scale.numpy())
    fit(model, x[BATCH:], y[BATCH:], epochs=1)
    weights = outcome(model)["weights"]
    return {
        "skipped": all(np.array_equal(before[i], w) for i, w in skipped["weights"].items()),
        "kept": skipped["kept"],
        "scale": scale,
        "went on": not any(np.array_equal(before[i], w) for i, w in weights.items()),
        "weights": weights,
    }


def scheduled(strategy):
    """Another codec from epoch to epoch, with the callbacks that look at the weights and links."""
    model = model_of(strategy_of(2, None), tied=True)
    schedule = {1: policy_of("onebit"), 2: policy_of("topk"), 3: None}
    compressor = model.distribute_strategy.extended.compressor
    names = []
    callbacks = [
        tfdist.callbacks.CompressionSchedule(schedule),
        tfdist.callbacks.ReplicaAudit(every=2),
        tfdist.callbacks.TrafficLogger(),
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: names.append(compressor.chosen)
        ),
    ]
    x, y = data(tied=True)
    return {**outcome(model, fit(model, x, y, callbacks=callbacks)), "names": names}


def drift(strategy, layer, at):
    """What the audit says where one rank changes a weight."""
    model = model_of(strategy_of(2, None), tied=True)
    rank = strategy.extended.worker_rank

    def change(batch, logs):
        if batch == 0 and rank == at:
            for variable in model.trainable_variables:
                if layer in variable.path:
                    variable.assign(variable + 1e-6)

    callbacks = [
        keras.callbacks.LambdaCallback(on_train_batch_end=change),
        tfdist.callbacks.ReplicaAudit(every=1),
    ]
    try:
        fit(model, *data(tied=True), callbacks=callbacks)
    except tfdist.errors.ReplicaMismatchError as error:
        return str(error)
    return "no error"


def resume(strategy, folder, how, stages=2):
    """Training that goes on from a file, and what goes on without."""
    x, y = data(tied=True)
    whole = model_of(strategy_of(stages, policy_of("onebit")), tied=True)
    fit(whole, x, y, epochs=2)
    path = os.path.join(folder, "model.weights.h5" if how == "load_weights" else "model.keras")
    whole.save_weights(path) if how == "load_weights" else whole.save(path)
    fit(whole, x, y, epochs=2)
    return outcome(whole), *resume_from(strategy, path, how, stages)


def resume_from(strategy, path, how, stages=2):
    """A new model that goes on from a file, and what is said of what is missing."""
    with messages_of("compression_files") as said:
        chosen = strategy_of(stages, policy_of("onebit"))
        if how == "load_weights":
            again = model_of(chosen, tied=True)
            with chosen.scope():
                again.optimizer.build(again.trainable_variables)
            again.load_weights(path)
        else:
            again = model_of(chosen, make=lambda: keras.models.load_model(path), tied=True)
            again.load_optimizer(path)
    fit(again, *data(tied=True), epochs=2)
    return outcome(again), said


def from_host_to_host(strategy, codec, **settings):
    """Three pipelines, where the workers of a host sum before they compress."""
    strategy = strategy_of(2, policy_of(codec, within_hosts=False, **settings))
    model = model_of(strategy, tied=True)
    traffic = tfdist.callbacks.TrafficLogger()
    history = fit(model, *data(tied=True), callbacks=[traffic])
    exchanges = {} if codec is None else strategy.extended.compressor._exchanges
    active = {exchange.compresses for made in exchanges.values() for exchange in made}
    return {**outcome(model, history), "active": active, "hosts": strategy.extended.workers.hosts}


def automatic(strategy):
    """A link that becomes slower for some, after two epochs."""
    auto = Policy(Auto((OneBit(),)), smallest=0)
    model = model_of(strategy_of(2, auto), tied=True)
    found = [
        Measurement({None: 1e-3, OneBit(): 2e-3}, 1e-3),
        Measurement({None: 4e-3, OneBit(): 2e-3}, 4e-3),
    ]
    compressor = model.distribute_strategy.extended.compressor
    names = []
    look = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: names.append(compressor.chosen)
    )
    with (
        unittest.mock.patch.object(hooks, "_SECONDS", 0.0),
        unittest.mock.patch.object(auto_module, "probe", side_effect=[1.1e-3, 4e-3, 4e-3]),
        unittest.mock.patch.object(auto_module, "measure", side_effect=found),
    ):
        history = fit(model, *data(tied=True), callbacks=[look])
    return {**outcome(model, history), "names": names}
