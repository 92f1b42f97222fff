"""What TensorFlow does on a GPU, be it a real one."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.strategy.behaviours.common import (
    compile_mlp,
    cross_entropy,
    fit,
    mlp,
    outcome,
    rows,
    scope,
)
from tfdist.compression import CODECS, Policy

_SHAPE = (64, 48)


def compute_and_sum(strategy):
    """In a graph: what a few operations give, its sums in several types, and where these lie."""
    (replica,) = strategy.extended.replicas

    @tf.function
    def run(x):
        with tf.device("GPU:0"):
            y = tf.tanh(x) * 2 + tf.sqrt(tf.abs(x) + 1)
            values = [y, tf.cast(y, "half"), tf.cast(x * 10, "int32")]
            return y, replica.all_reduce(values)

    x = np.random.default_rng(replica.rank).normal(size=_SHAPE).astype("float32")
    y, sums = run(x)
    devices = [tf.DeviceSpec.from_string(each.device).device_type for each in sums[:2]]
    return x, y.numpy(), [each.numpy() for each in sums], devices


def train_mirrored(_):
    """The losses on all GPUs of this process, and how many there are."""
    strategy = tfdist.MirroredStrategy(communication="native")
    history = fit(compile_mlp(strategy), *rows(80), batch_size=40)
    return history["loss"], strategy.num_replicas_in_sync


def train(_):
    """The same in one process without a strategy."""
    return fit(compile_mlp(None), *rows(80), batch_size=40)["loss"]


def train_with_shards(strategy):
    """With slots that the workers share out."""
    if strategy is not None:
        settings = {"shard_optimizer": True, "communication": "native"}
        strategy = tfdist.MultiWorkerMirroredStrategy(**settings)
    model = compile_mlp(strategy, keras.optimizers.Adam)
    return outcome(model, fit(model, *rows(80), batch_size=40))


def train_in_stages(strategy):
    """In a pipeline of all workers."""
    if strategy is None:
        model = compile_mlp(None)
    else:
        with scope(tfdist.PipelineStrategy(microbatches=2, communication="native")):
            model = tfdist.PipelineModel(mlp)
            model.compile("sgd", cross_entropy(), metrics=["accuracy"])
    return {"history": fit(model, *rows(80), batch_size=40)}


def step_with_codec(_, name):
    """The weights after steps with given gradients, and where the codec keeps its state."""
    policy = Policy(CODECS[name](), smallest=0, within_hosts=True)
    strategy = tfdist.MultiWorkerMirroredStrategy(compression=policy, communication="native")
    (replica,) = strategy.extended.replicas
    generator = np.random.default_rng(replica.rank)
    with strategy.scope():
        layer = keras.layers.Dense(_SHAPE[1], use_bias=False, kernel_initializer="zeros")
        layer.build((None, _SHAPE[0]))
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([layer.kernel])

    @tf.function
    def step(gradient):
        strategy.run(lambda: optimizer.apply_gradients([(gradient, layer.kernel)]))

    for _ in range(3):
        step(tf.constant(generator.normal(size=_SHAPE).astype("float32")))
    kept = optimizer.compression_state.variables
    devices = sorted({tf.DeviceSpec.from_string(each.device).device_type for each in kept})
    return layer.kernel.numpy(), devices
