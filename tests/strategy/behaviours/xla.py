"""Models that XLA compiles; with several replicas, what they compute between their collectives."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
from unittest import mock

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
from tests.strategy.behaviours.faults import message
from tfdist._src.keras.fit import atomic_step, compilation
from tfdist._src.strategy.commit_point import find_writes


def compiled_by_xla(strategy):
    model = compile_mlp(strategy, jit_compile=True)
    x, y = rows(40)
    return outcome(model, fit(model, x, y, batch_size=16, validation_data=(x, y)))


def with_sizes_known_to_one_worker(strategy, policy):
    """Each second batch has a size that is new to worker 0, and not to worker 1."""
    x, y = rows(9)  # In batches of 3 and 2 rows, and of 2 and 2.
    keras.mixed_precision.set_dtype_policy(policy)
    try:
        optimizer = functools.partial(keras.optimizers.Adam, 0.05, global_clipnorm=0.1)
        model = compile_mlp(strategy, optimizer, jit_compile=True)
        return outcome(model, fit(model, x, y, batch_size=5, epochs=6))
    finally:
        keras.mixed_precision.set_dtype_policy("float32")


def copies(strategy, accumulation):
    """The copies that a worker's devices hold of each variable, after a training."""
    with scope(strategy):
        wide = [keras.layers.Dense(64, "tanh"), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((64,)), *wide])
        settings = {"use_ema": True, "global_clipnorm": 1.0}
        optimizer = keras.optimizers.Adam(gradient_accumulation_steps=accumulation, **settings)
        model.compile(optimizer, "mse", jit_compile=True)
    x = np.random.default_rng(0).normal(size=(64, 67)).astype("float32")
    model.fit(x[:, :64], x[:, 64:], batch_size=8, epochs=2, verbose=0)
    variables = [*model.trainable_variables, *model.optimizer.variables]
    return [[copy.numpy() for copy in v.value.values] for v in variables if v.path != "iteration"]


def as_elsewhere(strategy, behaviour, *args):
    """A behaviour whose models are compiled unless they run eagerly.

    Args:
        strategy: the strategy.
        behaviour: "package.module:function".
        *args: further arguments of the function.
    """
    return _run(strategy, behaviour, args, xla=True)


def without(strategy, behaviour, *args):
    """A behaviour whose models are not compiled, not even on GPUs, where others are unasked."""
    return _run(strategy, behaviour, args, xla=False)


def _run(strategy, behaviour, args, *, xla):
    module, _, name = behaviour.partition(":")
    function = getattr(importlib.import_module(module), name)
    with contextlib.ExitStack() as stack:
        for kind in (keras.Model, tfdist.PipelineModel):
            stack.enter_context(mock.patch.object(kind, "compile", _compiling(kind.compile, xla)))
        return function(strategy, *args)


def _compiling(compile_model, xla):
    @functools.wraps(compile_model)
    def compile_with_xla(model, *args, **settings):
        jit = xla and not settings.get("run_eagerly")
        compile_model(model, *args, **{"jit_compile": jit, **settings})

    return compile_with_xla


def what_sums_wait_for(strategy, jit):
    """For each sum of gradients in a step, how many products of matrices it waits for."""
    graphs = []

    def note(graph):
        graphs.append(graph)
        return find_writes(graph)

    with scope(strategy):
        wide = [keras.layers.Dense(512, "tanh") for _ in range(8)]  # A bucket has four of them.
        model = keras.Sequential([keras.Input((512,)), *wide])
        model.compile("adam", "mse", jit_compile=jit)
    x = np.zeros((8, 512), "float32")
    # Of a fixed size: else there are conditionals, through which it cannot be seen.
    data = tf.data.Dataset.from_tensor_slices((x, x)).batch(8, drop_remainder=True)
    with mock.patch.object(atomic_step, "find_writes", note):
        model.fit(data, verbose=0)
    nodes = {node.name: node for node in graphs[-1].node}

    def sources(name, found):
        for given in nodes[name].input:
            source = given.removeprefix("^").partition(":")[0]
            if source not in found:
                found.add(source)
                sources(source, found)
        return found

    sums = [
        n for n in nodes.values() if n.op == "TfdistAllReduce" and b"gradient" in n.attr["key"].s
    ]
    functions = {f.signature.name: f.node_def for f in graphs[-1].library.function}

    def products(node):
        called = [a.func.name for a in node.attr.values() if a.HasField("func")]
        within = sum(products(n) for name in called for n in functions[name])
        return (node.op == "MatMul") + within

    return sorted(sum(products(nodes[s]) for s in sources(n.name, set())) for n in sums)


def compiled_on_one(strategy):
    x, y = rows(16)
    model = compile_mlp(strategy, jit_compile=tfdist.rank() == 0)
    return message(lambda: fit(model, x, y))


def compiled_for_unlike_gpus(strategy):
    x, y = rows(16)
    model = compile_mlp(strategy, jit_compile=True)
    details = {"device_name": f"GPU of rank {tfdist.rank()}"}
    with (
        mock.patch.object(compilation, "_trains_on_gpus", lambda _: True),
        mock.patch.object(tf.config, "get_visible_devices", lambda _: ["a GPU"]),
        mock.patch.object(tf.config.experimental, "get_device_details", lambda _: details),
    ):
        return message(lambda: fit(model, x, y))


class Centered(keras.layers.Layer):
    """Subtracts the mean of all rows, in a function of its own that XLA compiles."""

    def call(self, x):
        whole = tf.function(lambda x: x - tf.reduce_mean(tfdist.global_batch.rows(x), 0))
        return tf.function(whole, jit_compile=True)(x)


def a_layer_that_compiles_itself(strategy, jit_compile):
    x, y = rows(13)
    with scope(strategy):
        model = keras.Sequential([keras.Input((8,)), Centered(), keras.layers.Dense(3)])
        model.compile("sgd", cross_entropy(), jit_compile=jit_compile)
    return outcome(model, fit(model, x, y, batch_size=5))


def compiled_as_a_whole(strategy):
    """What is said of compiled functions with collectives; and the loss where that is compiled."""
    x, y = rows(12)
    with scope(strategy):
        model = mlp()
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

    def loss():
        return cross_entropy()(tf.constant(y), model(tf.constant(x)))

    def step(loss):
        with tf.GradientTape() as tape:
            value = loss()
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return value

    def run(loss):
        return strategy.run(step, (loss,))

    traced = tf.function(lambda: run(loss))
    traced()
    said = [
        message(tf.function(lambda: run(loss), jit_compile=True)),
        message(tf.function(lambda: traced(), jit_compile=True)),
    ]
    compiled = tf.function(loss, jit_compile=True)
    losses = [strategy.reduce("MEAN", tf.function(run)(each), None) for each in (compiled, loss)]
    return said, [float(each) for each in losses]


def switched_off(strategy):
    """What the variable does; a step that is compiled could not have this layer."""

    class Eigenvalues(keras.layers.Layer):
        def call(self, x):
            return tf.math.real(tf.linalg.eig(tf.matmul(x, x, transpose_a=True))[0])[None] + x

    x, y = rows(16)
    said = []
    for changed in ({"TFDIST_XLA": "0"}, {}):
        with mock.patch.dict(os.environ, changed), scope(strategy):
            model = keras.Sequential(
                [keras.Input((8,)), Eigenvalues(name="own"), keras.layers.Dense(3)]
            )
            model.compile("sgd", cross_entropy(), jit_compile=True)
            said.append(message(lambda: fit(model, x, y, batch_size=8)))  # noqa: B023
    return said


def evaluated_and_predicted(strategy):
    model = compile_mlp(strategy, jit_compile=True)
    x, y = rows(21)
    return {
        "evaluation": model.evaluate(x, y, batch_size=8, verbose=0),
        "predictions": model.predict(x, batch_size=8, verbose=0),
        "on_a_batch": model.train_on_batch(x, y),
        "weights": model.get_weights(),
    }


def chosen(strategy):
    """What "auto" chooses on CPUs, and would choose on GPUs, and what is said of it when."""
    found = []
    for on_gpus in (False, True):
        said = io.StringIO()
        with (
            mock.patch.object(compilation, "_trains_on_gpus", lambda _, on_gpus=on_gpus: on_gpus),
            contextlib.redirect_stderr(said),
        ):
            model = compile_mlp(strategy)
            eager = compile_mlp(strategy, run_eagerly=True)
            before = said.getvalue()
            fit(model, *rows(16))
            model.evaluate(*rows(16), verbose=0)
        found.append((bool(model.jit_compile), bool(eager.jit_compile), before, said.getvalue()))
    return found
